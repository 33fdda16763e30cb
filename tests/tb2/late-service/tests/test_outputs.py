from pathlib import Path

assert Path("/app/token.txt").read_text() == "token-7\n"
