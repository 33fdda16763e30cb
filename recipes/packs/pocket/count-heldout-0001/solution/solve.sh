#!/bin/sh
cd /work || exit
wc -l < garnet/meadow.txt > juniper.txt
