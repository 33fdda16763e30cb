#!/bin/sh
cd /work || exit
mv beacon.txt lagoon.txt
