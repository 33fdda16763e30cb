#!/bin/sh
cd /work || exit
mkdir -p pebble/cedar
