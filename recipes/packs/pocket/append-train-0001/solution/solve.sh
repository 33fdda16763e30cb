#!/bin/sh
cd /work || exit
echo harbor >> pebble.log
