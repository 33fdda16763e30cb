#!/bin/sh
cd /work || exit
rm juniper/maple.cfg
