#!/bin/bash
set -e
cat > backup.sh <<'E'
#!/bin/bash
cd /app && tar -czf backup.tar.gz data
E
chmod +x backup.sh
./backup.sh
