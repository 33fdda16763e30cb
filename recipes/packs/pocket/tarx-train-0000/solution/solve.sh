#!/bin/sh
cd /work || exit
tar -xf ivory.tar -C forest
