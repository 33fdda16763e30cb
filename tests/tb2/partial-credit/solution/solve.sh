#!/bin/bash
printf a > 1
printf b > 2
