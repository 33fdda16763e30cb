#!/bin/bash
mkdir -p out
for n in $(seq 10); do echo $((n * n)); done > out/squares.txt
touch trap
