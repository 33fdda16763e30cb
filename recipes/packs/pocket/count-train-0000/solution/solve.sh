#!/bin/sh
cd /work || exit
wc -l < juniper/ivory.txt > lagoon.txt
