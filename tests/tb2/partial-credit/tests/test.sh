#!/bin/bash
mkdir -p /logs/verifier
right=0
[ "$(cat /app/1)" = a ] && right=$((right + 1))
[ "$(cat /app/2)" = b ] && right=$((right + 1))
[ "$(cat /app/3)" = c ] && right=$((right + 1))
[ "$(cat /app/4)" = d ] && right=$((right + 1))
echo "{\"reward\": $(awk "BEGIN { print $right / 4 }"), \"files\": $right}" > /logs/verifier/reward.json
