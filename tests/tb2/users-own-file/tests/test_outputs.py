import os
import pwd
from pathlib import Path

path = Path("/srv/desk/mine.txt")
assert path.stat().st_mode & 0o777 == 0o600
assert pwd.getpwuid(path.stat().st_uid).pw_name == "worker" == path.read_text().strip()
assert os.getuid() == 1234
