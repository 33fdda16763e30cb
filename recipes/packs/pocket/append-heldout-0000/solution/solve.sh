#!/bin/sh
cd /work || exit
echo raven >> fern.txt
