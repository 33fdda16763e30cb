import subprocess

listed = subprocess.run(["tar", "-tzf", "/app/backup.tar.gz"], capture_output=True, check=True, text=True)
files = {name for name in listed.stdout.splitlines() if not name.endswith("/")}
assert files == {"data/one.txt", "data/two words.txt"}, files
