#!/bin/sh
cd /work || exit
mv saffron.cfg nectar.cfg
