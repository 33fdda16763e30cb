#!/bin/sh
cd /work || exit
cut -d, -f2 raven.csv > glacier.txt
