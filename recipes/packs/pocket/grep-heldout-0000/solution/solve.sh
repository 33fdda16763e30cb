#!/bin/sh
cd /work || exit
grep lagoon pebble.cfg > marble.txt
