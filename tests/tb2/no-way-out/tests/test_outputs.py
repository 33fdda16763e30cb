import socket
from pathlib import Path

assert Path("/app/alone.txt").read_text() == "yes\n"
routes = Path("/proc/net/route").read_text().splitlines()[1:]
assert not [route for route in routes if route.split()[1] == "00000000"]
try:
    socket.create_connection(("192.0.2.1", 80), timeout=2)
except OSError:
    pass
else:
    raise AssertionError("there is a way out")
