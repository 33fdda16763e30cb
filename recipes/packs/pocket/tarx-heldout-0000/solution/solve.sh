#!/bin/sh
cd /work || exit
tar -xf onyx.tar -C lantern
