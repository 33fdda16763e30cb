#!/bin/sh
cd /work || exit
mkdir -p hazel/ember
