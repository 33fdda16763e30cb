from pathlib import Path

words = Path("/app/words.txt").read_text().split()
assert Path("/app/sorted.txt").read_text().split() == sorted(words, key=lambda word: (len(word), word))
