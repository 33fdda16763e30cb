#!/bin/bash
if (exec 3<>/dev/tcp/192.0.2.1/80) 2>/dev/null; then echo no; else echo yes; fi > alone.txt
