#!/bin/sh
cd /work || exit
echo juniper > quartz.cfg
