#!/bin/sh
echo olive
