#!/bin/sh
cd /work || exit
wc -l < cobalt/marble.txt > maple.txt
