"""Metrics of sessions: what prefix caches saved, and whether trained tokens drift from their text."""

from __future__ import annotations

from collections.abc import Sequence

from rollhook.records import DRIFT_CATEGORIES, EpisodeRecord


def session_metrics(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Return the metrics of these episodes; rates of drift are shares of those that were looked at."""
    metrics = {}
    if asked := sum(record.input_tokens for record in records):
        metrics["rollout/prefix_cache_hit_rate"] = sum(record.cached_tokens for record in records) / asked
    checked = [record.drift for record in records if record.drift is not None]
    if checked:
        for category in DRIFT_CATEGORIES:
            metrics[f"rollout/drift/{category}"] = sum(category in found for found in checked) / len(checked)
    return metrics
