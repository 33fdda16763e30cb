#!/bin/sh
cd /work || exit
grep glacier beacon.txt > forest.txt
