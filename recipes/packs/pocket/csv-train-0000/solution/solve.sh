#!/bin/sh
cd /work || exit
cut -d, -f3 quartz.csv > saffron.txt
