#!/bin/sh
cd /work || exit
sort -u harbor/ember.txt > island.txt
