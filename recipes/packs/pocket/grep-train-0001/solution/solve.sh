#!/bin/sh
cd /work || exit
grep amber basil.txt > hazel.txt
