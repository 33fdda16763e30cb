#!/bin/sh
cd /work || exit
cp nectar.log harbor.log
