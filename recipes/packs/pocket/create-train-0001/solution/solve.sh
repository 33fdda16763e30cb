#!/bin/sh
cd /work || exit
echo ember > linen.txt
