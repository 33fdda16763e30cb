#!/bin/sh
cd /work || exit
cp nectar.txt fern.txt
