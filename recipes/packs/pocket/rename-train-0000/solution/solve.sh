#!/bin/sh
cd /work || exit
mv meadow.log birch.log
