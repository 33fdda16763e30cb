#!/bin/sh
cd /work || exit
cp amber.cfg island.cfg
