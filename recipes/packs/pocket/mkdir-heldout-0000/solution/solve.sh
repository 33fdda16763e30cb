#!/bin/sh
cd /work || exit
mkdir -p delta/canyon
