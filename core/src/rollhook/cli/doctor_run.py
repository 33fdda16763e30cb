"""`rollhook doctor RUN`: how a run stands, what its episodes wait for, and which deadline is next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer

from rollhook.cli.output import as_json, table
from rollhook.terminal import one_line

if TYPE_CHECKING:
    from rollhook.runtime.diagnosis import Diagnosis

#: live episodes and open leases that are shown; --json has all
MOST = 50
HEADER = ("DEADLINE", "EPISODE", "TASK", "DOES", "FOR", "WAITS FOR", "TURNS", "TOKENS", "SANDBOX")


def doctor_run(reference: str, json: bool) -> int:
    """Print how a run stands and return the exit code: 1 when it died or failed."""
    from rollhook.rundir import RunDir
    from rollhook.runtime.diagnosis import diagnose

    found = diagnose(RunDir.find(reference))
    if json:
        as_json(found.data())
    else:
        for line in _lines(found):
            _say(line)
        _episodes(found)
        _leases(found)
        for number, command in enumerate(found.way_on):
            _say(("go on with: " if number == 0 else "            ") + command)
    return 1 if found.state in ("dead", "failed") else 0


def _lines(found: Diagnosis) -> Iterator[str]:
    yield f"run {found.run_id}: {found.state}"
    if found.attempt is not None:
        alive = "; its heartbeat moves" if found.state == "running" else ""
        yield f"attempt {found.attempt}: {found.owner}{alive}"
    if found.journal is not None:
        last = found.journal
        yield f"journal: entry {last.seq} ({last.event}), {last.seconds_ago:.1f} s ago"
    if found.committed_step is not None:
        yield f"committed: step {found.committed_step}, weight version {found.weight_version}"
    elif found.attempt is not None:
        yield "committed: no step yet"
    for engine in found.engines:
        yield f"engine {_engine(engine)}"
    for finding in found.findings:
        yield f"! {finding}"


def _engine(engine: Mapping[str, Any]) -> str:
    rank = "" if engine["dp_rank"] is None else f" rank {engine['dp_rank']}"
    well = "healthy" if engine["healthy"] else "NOT HEALTHY"
    load = f"{engine['open_sessions']} sessions, {engine['tokens_in_flight']} tokens in flight"
    queue = f"queue {engine['queue_seconds']:.1f} s"
    return f"{engine['url']}{rank}: {well}, weight version {engine['version']}, {load}, {queue}"


def _episodes(found: Diagnosis) -> None:
    if not found.episodes:
        return
    when = f"{found.live_seconds_ago:.1f} s ago"
    what = "live episodes" if found.state == "running" else "episodes were live"
    _say(f"{len(found.episodes)} {what} {when}, the nearest deadline first:")
    table([HEADER, *(_row(each) for each in found.episodes[:MOST])], indent="  ")
    if (left := len(found.episodes) - MOST) > 0:
        _say(f"  {left} more are in --json")


def _row(episode: Mapping[str, Any]) -> list[str]:
    deadline = episode["deadline"]
    return [
        "-" if deadline is None else f"{deadline['seconds_left']:.1f} s {deadline['name']}",
        episode["episode_id"],
        episode["task_id"],
        episode["node"] or "between nodes",
        f"{episode['seconds_in_node']:.1f} s",
        f"{episode['waits_for']} ({episode['seconds_waiting']:.1f} s)" if episode["waits_for"] else "-",
        str(episode["turns"]),
        str(episode["tokens"]),
        ", ".join(episode["sandboxes"].values()) or "-",
    ]


def _leases(found: Diagnosis) -> None:
    if not found.open_leases:
        return
    _say(f"{len(found.open_leases)} sandboxes may be left (open leases):")
    rows = [
        [lease.sandbox_id or "(not known)", lease.episode or "(created ahead)", lease.host]
        for lease in found.open_leases[:MOST]
    ]
    table([("SANDBOX", "EPISODE", "HOST"), *rows], indent="  ")
    if (left := len(found.open_leases) - MOST) > 0:
        _say(f"  {left} more are in --json")


def _say(text: str) -> None:
    typer.echo(one_line(text))
