#!/bin/bash
printf "%s\n" "$GREETING" "$PLACE" "$LEVEL" > settings.txt
