#!/bin/bash
echo plan > plan.txt
