#!/bin/sh
cd /work || exit
chmod +x raven/quartz.sh
