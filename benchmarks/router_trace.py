"""Makes, writes and reads traces: which session of agents asks for how many tokens, and when.

A trace is JSON lines (gzip when its name ends in .gz). The first line describes it:

    {"format": "rollhook-router-trace/1", "concurrency": 128, "system": 1800, ...}

`concurrency` sessions are open at once; the next of the file starts when one ends, as in a rollout.
`system` is the number of tokens that every prompt starts with (instructions and tools). Other keys say how
it was made. Every further line is one session, in the order of their starts:

    {"session": "g003-5", "group": "g003", "task": 620, "own": 0, "turns": [[85, 2.31, 240], [130, 0, 0]]}

Its first prompt is `system` tokens that all share, `task` tokens that the sessions of a group share, and
`own` tokens of its own. A turn is [tokens generated, seconds in a tool after it, tokens that come back from
the tool]; the next prompt is the last one, the reply and the tool's tokens. No ids are stored: spans that
are shared are equal, all others differ.

`router_trace.jsonl.gz` beside this program is what it writes without options. Lengths and times are
lognormal, as in practice (many short ones, a long tail); siblings share how hard their task is. The shape
follows a common setting of terminal agents (8 siblings, 128 sessions at once, at most 30 turns and 65536
tokens), and no router.
"""

from __future__ import annotations

import argparse
import gzip
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

FORMAT = "rollhook-router-trace/1"
COMMITTED = Path(__file__).with_name("router_trace.jsonl.gz")


@dataclass(frozen=True)
class Turn:
    """A reply (tokens), then a tool: how long it takes (seconds), and what it adds to the prompt (tokens)."""

    reply: int
    tool_seconds: float
    tool_tokens: int


@dataclass(frozen=True)
class Session:
    name: str
    group: str
    task: int
    own: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Trace:
    concurrency: int
    system: int
    sessions: tuple[Session, ...]


@dataclass(frozen=True)
class Shape:
    """How a trace is drawn: medians, and sigmas of the lognormal distributions."""

    seed: int = 20
    groups: int = 48
    siblings: int = 8
    concurrency: int = 128
    system: int = 1800
    context: int = 65536
    max_turns: int = 30
    turns: float = 9.0
    turns_sigma_task: float = 0.5
    turns_sigma: float = 0.5
    task: float = 600.0
    task_sigma: float = 0.8
    reply: float = 120.0
    reply_sigma: float = 1.0
    tool_tokens: float = 250.0
    tool_tokens_sigma: float = 1.3
    tool_seconds: float = 1.5
    tool_seconds_sigma: float = 1.4


def draw(shape: Shape) -> Iterator[Session]:
    """Draw the sessions of a trace."""
    rng = random.Random(shape.seed)

    def lognormal(median: float, sigma: float, most: float) -> float:
        return min(most, rng.lognormvariate(math.log(median), sigma))

    for number in range(shape.groups):
        task = max(20, round(lognormal(shape.task, shape.task_sigma, 8192)))
        hard = lognormal(shape.turns, shape.turns_sigma_task, shape.max_turns)
        for sibling in range(shape.siblings):
            wanted = max(1, round(lognormal(hard, shape.turns_sigma, shape.max_turns)))
            length = shape.system + task
            turns: list[Turn] = []
            while len(turns) < wanted:
                reply = max(4, round(lognormal(shape.reply, shape.reply_sigma, 8192)))
                seconds = round(lognormal(shape.tool_seconds, shape.tool_seconds_sigma, 600), 2)
                tokens = max(3, round(lognormal(shape.tool_tokens, shape.tool_tokens_sigma, 8192)))
                length += reply + tokens
                if length > shape.context:
                    break
                turns.append(Turn(reply, seconds, tokens))
            turns[-1] = Turn(turns[-1].reply, 0.0, 0)
            yield Session(f"g{number:03}-{sibling}", f"g{number:03}", task, 0, tuple(turns))


def write(path: Path, shape: Shape) -> None:
    header = {"format": FORMAT, **asdict(shape)}
    rows = [
        {
            "session": each.name,
            "group": each.group,
            "task": each.task,
            "own": each.own,
            "turns": [[turn.reply, turn.tool_seconds, turn.tool_tokens] for turn in each.turns],
        }
        for each in draw(shape)
    ]
    data = b"".join(orjson.dumps(row) + b"\n" for row in [header, *rows])
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def read(path: Path) -> Trace:
    """Read a trace. Raises SystemExit, with the line, when it is none."""
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    number = 1
    try:
        header = orjson.loads(lines[0])
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r} instead of {FORMAT!r}")
        sessions = []
        for line in lines[1:]:
            number += 1
            row = orjson.loads(line)
            turns = tuple(Turn(*turn) for turn in row["turns"])
            if not turns:
                raise ValueError("a session without turns")
            sessions.append(Session(row["session"], row["group"], row["task"], row.get("own", 0), turns))
        return Trace(header["concurrency"], header["system"], tuple(sessions))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise SystemExit(f"{path}, line {number}: {type(error).__name__}: {error}") from error


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=COMMITTED, help=f"default: {COMMITTED.name} beside this")
    for name, value in asdict(Shape()).items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(value), default=value, help=f"default: {value}")
    options = vars(parser.parse_args(argv))
    out = options.pop("out")
    write(out, Shape(**options))
    sys.stdout.write(f"wrote {out}: {summary(read(out))}\n")


def summary(trace: Trace) -> str:
    """Return what a trace holds, in a line."""
    turns = sorted(len(each.turns) for each in trace.sessions)
    tools = sorted(turn.tool_seconds for each in trace.sessions for turn in each.turns)
    prompts = []
    for each in trace.sessions:
        length = trace.system + each.task + each.own
        for turn in each.turns:
            prompts.append(length)
            length += turn.reply + turn.tool_tokens
    prompts.sort()

    def spread(values: Sequence[float]) -> str:
        at = [values[int(len(values) * q)] for q in (0.5, 0.9, 0.99)]
        return "/".join(f"{value:g}" for value in at)

    return (
        f"{len(trace.sessions)} sessions, {sum(turns)} turns, {trace.concurrency} at once; p50/p90/p99: "
        f"turns {spread(turns)}, prompt tokens {spread(prompts)}, tool seconds {spread(tools)}"
    )


if __name__ == "__main__":
    main()
