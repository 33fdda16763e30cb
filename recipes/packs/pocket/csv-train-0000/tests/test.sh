#!/bin/sh
# Writes 1 to /logs/verifier/reward.txt if everything in solved holds, else 0.
holds() {
  [ -f "$1" ] && [ ! -L "$1" ] && [ "$(head -c 4096 "$1")" = "$2" ]
}
solved() {
  cd /work || return 1
  holds saffron.txt '70
72
77
96' &&
  holds quartz.csv 'juniper,32,70
maple,46,72
birch,11,77
forest,33,96'
}
reward=0
if solved > /dev/null 2>&1; then reward=1; fi
[ -d /logs/verifier ] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
