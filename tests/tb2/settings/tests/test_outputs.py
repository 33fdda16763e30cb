from pathlib import Path

assert Path("/app/settings.txt").read_text().splitlines() == ["hello there", "the default", "2"]
