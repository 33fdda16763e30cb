#!/bin/sh
cd /work || exit
echo heron >> indigo.log
