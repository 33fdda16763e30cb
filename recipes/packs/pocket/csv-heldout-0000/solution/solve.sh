#!/bin/sh
cd /work || exit
cut -d, -f2 falcon.csv > marble.txt
