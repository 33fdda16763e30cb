#!/bin/sh
cd /work || exit
rm ivory/harbor.log
