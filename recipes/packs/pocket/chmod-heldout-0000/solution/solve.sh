#!/bin/sh
cd /work || exit
chmod +x maple/falcon.sh
