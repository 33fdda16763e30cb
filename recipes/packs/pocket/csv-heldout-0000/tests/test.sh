#!/bin/sh
# Writes 1 to /logs/verifier/reward.txt if everything in solved holds, else 0.
holds() {
  [ -f "$1" ] && [ ! -L "$1" ] && [ "$(head -c 4096 "$1")" = "$2" ]
}
solved() {
  cd /work || return 1
  holds marble.txt '25
40
44
20' &&
  holds falcon.csv 'olive,25,99
lantern,40,64
glacier,44,61
jasper,20,60'
}
reward=0
if solved > /dev/null 2>&1; then reward=1; fi
[ -d /logs/verifier ] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
