#!/bin/bash
set -e
id -un > mine.txt
chmod 600 mine.txt
