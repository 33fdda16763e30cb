#!/bin/sh
cd /work || exit
mv copper.txt falcon.txt
