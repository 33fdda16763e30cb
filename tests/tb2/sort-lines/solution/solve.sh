#!/bin/bash
set -e
awk '{ print length($0) "\t" $0 }' words.txt | LC_ALL=C sort -k1,1n -k2 | cut -f2- > sorted.txt
