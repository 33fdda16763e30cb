#!/bin/sh
cd /work || exit
cut -d, -f3 juniper.csv > ivory.txt
