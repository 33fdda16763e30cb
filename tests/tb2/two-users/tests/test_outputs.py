import os
from pathlib import Path

assert Path("/app/who.txt").read_text() == "guest\n"
assert Path("/app/root.txt").read_text() == "no\n"
assert os.getuid() == 0
