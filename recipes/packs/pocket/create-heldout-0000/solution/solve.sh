#!/bin/sh
cd /work || exit
echo pebble > mosaic.txt
