#!/bin/sh
cd /work || exit
sort -u marble/ivory.txt > ginger.txt
