"""A validator of episode directories: what every reader may rely on, checked line by line."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from rollhook.episode_store import read_records, read_samples
from rollhook.errors import RunError
from rollhook.records import EpisodeRecord, Sample


def same_sample(first: Sample, second: Sample) -> bool:
    """Return whether two samples are equal, tokens and log-probabilities bit for bit."""
    arrays = ("token_ids", "mask", "logprobs", "spans")
    plain = ("episode_id", "group_id", "task_id", "leaf", "reward", "outcome", "components")
    return all(getattr(first, name) == getattr(second, name) for name in plain) and all(
        getattr(first, name).dtype == getattr(second, name).dtype
        and getattr(first, name).shape == getattr(second, name).shape
        and getattr(first, name).tobytes() == getattr(second, name).tobytes()
        for name in arrays
    )


def check_episodes(directory: Path) -> list[str]:
    """Return what is wrong with the episodes of a directory, one sentence each; empty when all is well."""
    problems: list[str] = []
    records: dict[str, EpisodeRecord] = {}
    leaves: set[tuple[str, int]] = set()
    try:
        for record in read_records(directory):
            if record.episode_id in records:
                problems.append(f"episode {record.episode_id} occurs twice")
            records[record.episode_id] = record
            problems += _record_problems(record)
        for sample in read_samples(directory):
            if (sample.episode_id, sample.leaf) in leaves:
                problems.append(f"episode {sample.episode_id}: leaf {sample.leaf} occurs twice")
            leaves.add((sample.episode_id, sample.leaf))
            problems += _sample_problems(sample, records[sample.episode_id])
    except RunError as error:
        problems.append(str(error))
    return problems


def _record_problems(record: EpisodeRecord) -> list[str]:
    found = []
    if record.outcome.kind == "infra_error" and not record.outcome.boundary:
        found.append("an infra_error names no boundary")
    if record.versions is not None and record.versions[0] > record.versions[1]:
        found.append(f"versions {record.versions} run backwards")
    if any(seconds < 0 for seconds in record.timings.values()):
        found.append("a timing is negative")
    return [f"episode {record.episode_id}: {problem}" for problem in found]


def _sample_problems(sample: Sample, record: EpisodeRecord) -> list[str]:
    found = []
    if not math.isfinite(sample.reward):
        found.append(f"reward {sample.reward} is not finite")
    if not record.outcome.trains:
        found.append(f"it has tokens to train on, and its outcome {record.outcome.kind} never trains")
    if not np.isin(sample.mask, (0, 1)).all():
        found.append("mask holds values other than 0 and 1")
    if (sample.logprobs[sample.mask == 0] != 0).any():
        found.append("a token that was not generated has a log-probability")
    if not np.isfinite(sample.logprobs).all() or (sample.logprobs > 0).any():
        found.append("a log-probability is not a finite number of at most 0")
    if (sample.token_ids < 0).any():
        found.append("a token id is negative")
    return [
        f"episode {sample.episode_id}, leaf {sample.leaf}: {p}" for p in [*found, *_span_problems(sample)]
    ]


def _span_problems(sample: Sample) -> list[str]:
    """Spans cover the generated tokens exactly, in order, each with an ordered pair of versions."""
    found = []
    covered = np.zeros(len(sample.token_ids), dtype=np.uint8)
    end = 0
    for start, stop, first, last in sample.spans.tolist():
        if not end <= start < stop <= len(covered):
            found.append(f"span ({start}, {stop}) is out of order or out of range")
            return found
        if first > last:
            found.append(f"span ({start}, {stop}) has versions {first} to {last}")
        covered[start:stop] = 1
        end = stop
    if len(sample.mask) == len(covered) and (covered != (sample.mask != 0)).any():
        found.append("the spans do not cover exactly the generated tokens")
    return found
