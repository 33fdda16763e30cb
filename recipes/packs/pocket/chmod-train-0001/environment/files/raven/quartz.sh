#!/bin/sh
echo hazel
