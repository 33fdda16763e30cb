#!/bin/sh
cd /work || exit
tar -cf lagoon.tar candle
