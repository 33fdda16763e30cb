#!/bin/sh
cd /work || exit
mkdir -p indigo/ivory
