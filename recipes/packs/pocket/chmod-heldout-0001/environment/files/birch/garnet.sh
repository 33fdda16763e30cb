#!/bin/sh
echo island
