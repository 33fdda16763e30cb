"""What the command line costs to start, beside what it could not do without.

`--help` and `plugins` stand beside a typer program of two commands; `check quickstart` beside importing
typer, pydantic, omegaconf and the plugin modules of that recipe: once of the composition alone, which the
budget is for, and once with what this machine holds, where it reads every task of the pack. Rounds take
turns; the best of each counts, which other work on the machine disturbs least. Both budgets are 1.5x (CPU).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import measuring

TYPER = """
import typer
app = typer.Typer()
@app.command()
def one(name: str, count: int = 1): "Do one thing."
@app.command()
def two(name: str): "Do another."
app()
"""
PLUGINS = (
    *("rollhook_agents", "rollhook_local", "rollhook_routing"),
    *("rollhook_tbench2", "rollhook_torch", "rollhook_trackers"),
)
CHECK = ("check", "quickstart")
IMPORTS = f"import typer, pydantic, omegaconf, {', '.join(PLUGINS)}"


def commands(scratch: Path) -> dict[str, tuple[list[str], str]]:
    """Return what is run, and beside what."""
    (scratch / "two.py").write_text(TYPER)
    rollhook = [sys.executable, "-m", "rollhook.cli.main"]
    return {
        "typer program: --help": ([sys.executable, str(scratch / "two.py"), "--help"], ""),
        "rollhook --help": ([*rollhook, "--help"], "typer program: --help"),
        "rollhook plugins": ([*rollhook, "plugins"], "typer program: --help"),
        "imports of check": ([sys.executable, "-c", IMPORTS], ""),
        "rollhook check --site none": ([*rollhook, *CHECK, "--site", "none"], "imports of check"),
        "rollhook check, 3,016 tasks read": ([*rollhook, *CHECK], "imports of check"),
    }


def once(argv: Sequence[str], cwd: Path) -> tuple[float, float]:
    """Return milliseconds of wall and of CPU."""
    began = time.perf_counter()
    process = subprocess.Popen(argv, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    assert process.returncode == 0, argv
    return wall * 1e3, (usage.ru_utime + usage.ru_stime) * 1e3


def main() -> None:
    parser = measuring.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=20, help="of each (default: 20)")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as scratch:
        wanted = commands(Path(scratch))
        if options.quick:
            del wanted["rollhook check, 3,016 tasks read"]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in wanted}
        for number in range(int(options.quick), rounds + 1):
            for name, (argv, _) in wanted.items():
                figures = once(argv, Path(scratch))
                if number:  # the first fills the caches
                    found[name].append(figures)
    rows = []
    for name, (_, beside) in wanted.items():
        wall, cpu = zip(*found[name], strict=True)
        ratio = min(cpu) / min(c for _, c in found[beside]) if beside else ""
        rows.append([name, min(wall), statistics.median(wall), min(cpu), statistics.median(cpu), ratio])
    columns = ["", "wall ms, best", "median", "CPU ms, best", "median", "x its base (CPU)"]
    measuring.table("starting", columns, rows)


if __name__ == "__main__":
    main()
