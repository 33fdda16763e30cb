from pathlib import Path

lines = [line for path in Path("/app/logs").glob("*.log") for line in path.read_text().splitlines()]
assert len(lines) == 600
assert int(Path("/app/count.txt").read_text()) == sum("ERROR" in line.split() for line in lines)
