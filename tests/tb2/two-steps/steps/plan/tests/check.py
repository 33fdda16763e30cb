from pathlib import Path

path = Path("/app/plan.txt")
right = path.exists() and path.read_text() == "plan\n"
print(f'{{"reward": {float(right)}}}')
