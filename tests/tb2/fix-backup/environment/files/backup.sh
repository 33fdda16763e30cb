#!/bin/bash
cd /app
tar -czf backup.tar.gz $(find data -type f)
