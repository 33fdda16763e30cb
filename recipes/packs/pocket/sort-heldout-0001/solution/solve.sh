#!/bin/sh
cd /work || exit
sort -u quartz/lantern.txt > ember.txt
