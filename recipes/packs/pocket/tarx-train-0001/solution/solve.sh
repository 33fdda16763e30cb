#!/bin/sh
cd /work || exit
tar -xf basil.tar -C ivory
