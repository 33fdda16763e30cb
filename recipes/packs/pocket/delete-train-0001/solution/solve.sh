#!/bin/sh
cd /work || exit
rm hazel/birch.log
