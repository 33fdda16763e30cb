#!/bin/sh
cd /work || exit
chmod +x birch/garnet.sh
