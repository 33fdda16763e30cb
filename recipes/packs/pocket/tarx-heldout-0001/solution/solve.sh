#!/bin/sh
cd /work || exit
tar -xf harbor.tar -C basil
