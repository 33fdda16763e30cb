"""Hints from the metrics of recent steps: what holds a run back, and what to do about it.

The thresholds are those of miles' dashboard where it has the same rule. A hint comes up at one threshold and
goes at another, so that it does not flicker.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

Rows = Sequence[Mapping[str, float]]
#: steps that are looked at, and how many there must be
WINDOW, LEAST = 10, 3


@dataclass(frozen=True)
class Rule:
    """A hint: `measure` of the recent rows, None where it has no meaning; up from `fire`, gone below `clear`.

    `text` gets the measure as a share and in percent, and the name of the busiest worker.
    """

    name: str
    measure: Callable[[Rows], float | None]
    fire: float
    clear: float
    text: str


def advise(
    rows: Rows, active: Collection[str] = (), workers: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the hints of now, by the name of their rule; `active` are those of the step before.

    `rows` are the metrics of the steps that train on episodes, in order; the last `WINDOW` count. `workers`
    says where the engine workers are whose names are in the metrics.
    """
    rows = rows[-WINDOW:]
    if len(rows) < LEAST:
        return {}
    found = {}
    for rule in RULES:
        value = rule.measure(rows)
        if value is not None and value >= (rule.clear if rule.name in active else rule.fire):
            worker = _busiest(rows, workers or {})
            found[rule.name] = rule.text.format(percent=100 * value, value=value, worker=worker)
    return found


def _total(rows: Rows, name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows)


def _ratio(part: str, whole: str) -> Callable[[Rows], float | None]:
    def measure(rows: Rows) -> float | None:
        total = _total(rows, whole)
        return _total(rows, part) / total if total else None

    return measure


def _mean(name: str) -> Callable[[Rows], float | None]:
    def measure(rows: Rows) -> float | None:
        values = [row[name] for row in rows if name in row]
        return statistics.fmean(values) if values else None

    return measure


def _waiting(rows: Rows) -> float | None:
    """How much of the time the trainer waits; nothing to say where nothing is made in training."""
    overlaps = any(row.get("staleness/max", 0.0) > 0 for row in rows)
    return _ratio("time/wait_groups", "time/step")(rows) if overlaps else None


def _backlog(rows: Rows) -> float | None:
    """How many steps' groups wait, while the trainer hardly does."""
    groups = _total(rows, "groups/accepted") + _total(rows, "groups/rejected")
    waits = _ratio("time/wait_groups", "time/step")(rows)
    if not groups or waits is None or waits > 0.05:
        return None
    return _total(rows, "buffer/groups") / groups


def _growth(rows: Rows, name: str) -> float:
    return rows[-1].get(name, 0.0) - rows[0].get(name, 0.0)


def _too_old(rows: Rows) -> float | None:
    """The share of what began that became too old."""
    begun = _growth(rows, "books/submitted")
    return _growth(rows, "books/rejected/stale") / begun if begun > 0 else None


def _failing(rows: Rows) -> float | None:
    episodes = _total(rows, "rollout/episodes")
    return _total(rows, "outcome/infra_error") / episodes if episodes >= 100 else None


def _alike(rows: Rows) -> float | None:
    groups = _total(rows, "groups/accepted") + _total(rows, "groups/rejected")
    return _total(rows, "groups/rejected/zero_variance") / groups if groups else None


def _uncached(rows: Rows) -> float | None:
    hits = _mean("rollout/prefix_cache_hit_rate")(rows)
    many_turns = _mean("rollout/turns_mean")(rows) or 0.0
    return 1.0 - hits if hits is not None and many_turns >= 2 else None


def _slow(rows: Rows) -> float | None:
    """The newest step's time over the usual, of long ones."""
    *before, newest = [row.get("time/step", 0.0) for row in rows]
    usual = statistics.median(before)
    return newest / usual if usual and newest >= 1800 else None


def _busiest(rows: Rows, workers: Mapping[str, str]) -> str:
    """Name the worker with the most tokens in flight; none had any where rows are written between steps."""
    loads = {name: _total(rows, name) for name in rows[-1] if "/tokens_in_flight/" in name}
    if not any(loads.values()):
        return "the busiest"
    name = max(loads, key=lambda name: loads[name]).rpartition("/")[2]
    return workers.get(name, f"worker {name}")


RULES = (
    Rule(
        "rollout bound", _waiting, 0.2, 0.1,
        "rollout bound: the trainer waits {percent:.0f} % of the time for groups; more engines or "
        "rollout.max_concurrent",
    ),
    Rule(
        "training bound", _backlog, 1.0, 0.5,
        "training bound: {value:.1f} steps' groups wait for the trainer; fewer engines are enough, or "
        "larger steps (rollout.batch_groups)",
    ),
    Rule(
        "stale", _too_old, 0.2, 0.1,
        "stale: {percent:.0f} % of the episodes become too old to train; raise rollout.max_staleness or "
        "rollout.batch_groups, or let groups train without stragglers (rollout.min_group)",
    ),
    Rule(
        "failing", _failing, 0.05, 0.03,
        "failing: the machinery fails {percent:.0f} % of the episodes; `rollhook report` says where",
    ),
    Rule(
        "no variance", _alike, 0.5, 0.4,
        "no variance: {percent:.0f} % of the groups have equal rewards and do not train; other tasks, larger "
        "groups (rollout.group_size), or rollout.draw learnable if it is not",
    ),
    Rule(
        "truncated", _mean("rollout/truncated_ratio"), 0.25, 0.2,
        "truncated: {percent:.0f} % of the episodes run out of tokens or turns; see budgets.max_seq_len, "
        "reply_tokens, turns",
    ),
    Rule(
        "prefix cache", _uncached, 0.9, 0.85,
        "prefix cache: engines compute {percent:.0f} % of the prompts anew; a router policy that keeps "
        "sessions (sticky), or more cache",
    ),
    Rule(
        "hot rank", _mean("router/token_imbalance"), 1.5, 1.25,
        "one dp rank is hot: {worker} has {value:.1f} times the mean load; try router sticky+min_load",
    ),
    Rule(
        "slow step", _slow, 6.0, 3.0,
        "slow step: the last took {value:.1f} times as long as usual; `rollhook doctor` says why",
    ),
)  # fmt: skip
