#!/bin/sh
cd /work || exit
tar -cf canyon.tar basil
