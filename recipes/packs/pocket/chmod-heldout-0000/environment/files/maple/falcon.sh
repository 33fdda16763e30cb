#!/bin/sh
echo copper
