#!/bin/sh
cd /work || exit
echo basil > hazel.txt
