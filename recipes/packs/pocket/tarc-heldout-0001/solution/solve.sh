#!/bin/sh
cd /work || exit
tar -cf comet.tar marble
