#!/bin/bash
cp /run/token.txt token.txt
