from pathlib import Path

squares = Path("/app/out/squares.txt")
assert squares.exists()
assert [int(line) for line in squares.read_text().split()] == [n * n for n in range(1, 11)]
assert not Path("/app/trap").exists()
