#!/bin/sh
cd /work || exit
chmod +x ember/anchor.sh
