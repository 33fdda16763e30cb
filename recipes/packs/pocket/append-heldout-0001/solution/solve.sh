#!/bin/sh
cd /work || exit
echo lagoon >> amber.cfg
