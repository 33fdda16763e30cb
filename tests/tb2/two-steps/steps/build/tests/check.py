from pathlib import Path

path = Path("/app/built.txt")
right = path.exists() and path.read_text().split() == ["four", "three", "two", "one"]
print(f'{{"reward": {1.0 if right else 0.25}}}')
