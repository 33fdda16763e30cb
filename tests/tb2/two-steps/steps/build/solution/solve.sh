#!/bin/bash
tac parts.txt > built.txt
