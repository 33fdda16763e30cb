"""What the benchmarks share: their arguments, their tables, and the peers that they measure beside us."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: no peer may report home
SILENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "OTEL_SDK_DISABLED": "true",
    "WANDB_MODE": "disabled",
}


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds, no peer: does it run at all?")
    return parser


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: the first column to the left, numbers to the right."""
    cells = [list(columns), *([_text(value) for value in row] for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(columns))]
    print(f"\n{title}")
    for row in cells:
        print(
            "  ".join(
                c.ljust(w) if n == 0 else c.rjust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True))
            )
        )


def _text(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def peer(requirement: str) -> Path | None:
    """Return the Python of an environment with a peer alone, made at first; None (and said why) without."""
    directory = ROOT / ".venv-peers" / requirement
    python = directory / "bin/python"
    if not (directory / "installed").exists():
        print(f"installing {requirement} into {directory.relative_to(ROOT)} ...", file=sys.stderr)
        install = [python, "-m", "pip", "install", "-q", requirement]
        for argv in ([sys.executable, "-m", "venv", directory], install):
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{requirement} is left out: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                return None
        (directory / "installed").touch()
    return python


def measured(argv: Sequence[str | Path], **env: str) -> dict[str, float]:
    """Run a program, whose heap is its own, and return the JSON object on its last line."""
    done = subprocess.run(
        [str(each) for each in argv],
        env={**os.environ, **SILENT, **env},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
