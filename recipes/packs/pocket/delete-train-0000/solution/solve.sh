#!/bin/sh
cd /work || exit
rm candle/beacon.cfg
