#!/bin/sh
cd /work || exit
wc -l < willow/saffron.txt > jasper.txt
