#!/bin/sh
cd /work || exit
grep lagoon orchid.cfg > onyx.txt
