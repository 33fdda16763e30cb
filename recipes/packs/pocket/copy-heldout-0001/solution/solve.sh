#!/bin/sh
cd /work || exit
cp indigo.txt marble.txt
