#!/bin/bash
echo four >> parts.txt
