#!/bin/sh
cd /work || exit
sort -u willow/saffron.txt > garnet.txt
