#!/bin/bash
cat logs/*.log | grep -cw ERROR > count.txt
