"""Transcripts of episodes, cut where they are long."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollhook.records import EpisodeRecord

#: characters of a text and messages of a transcript that are shown
MAX_TEXT, MAX_MESSAGES = 6000, 60


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text, its middle left out where it is longer, with a note of how much."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]}\n[... {len(text) - head - tail:,} characters are cut here ...]\n{text[-tail:]}"


def transcript(record: EpisodeRecord) -> dict[str, Any]:
    """Return what a page shows of an episode."""
    seconds = record.timings.get("total", 0.0)
    facts = [
        ("episode", record.episode_id),
        ("ended", record.ended + (f" ({record.fired} ran out)" if record.fired else "")),
        ("components", ", ".join(f"{name} {value:g}" for name, value in record.components.items())),
        ("weight versions", "{} to {}".format(*record.versions) if record.versions else ""),
        ("warnings", cut("; ".join(record.warnings))),
    ]
    reward = record.outcome.reward
    return {
        "reward": "no reward" if reward is None else f"{reward:g}",
        "task": record.task_id,
        "summary": f"{record.purpose}, {record.turns} turns, "
        f"{record.completion_tokens:,} tokens, {duration(seconds)}",
        "facts": [(name, value) for name, value in facts if value],
        "messages": list(_messages(record.messages)),
        "detail": cut(json.dumps(record.detail, indent=2, ensure_ascii=False, default=str)),
    }


def _messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    gap = len(messages) - MAX_MESSAGES
    for number, message in enumerate(messages):
        if gap > 0 and 10 <= number < 10 + gap:
            if number == 10:
                yield {"gap": f"{gap:,} messages are cut here"}
            continue
        role = str(message.get("role"))
        kind = role if role in ("system", "user", "assistant", "tool") else "other"
        yield {"gap": "", "role": role, "kind": kind, "text": cut(_said(message))}


def _said(message: Mapping[str, Any]) -> str:
    parts = []
    if message.get("reasoning_content"):
        parts.append(f"(reasoning)\n{message['reasoning_content']}")
    if message.get("content"):
        parts.append(str(message["content"]))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append(f"(calls {function.get('name')})\n{function.get('arguments')}")
    return "\n\n".join(parts)


def duration(seconds: float) -> str:
    """Return seconds as a person would say them."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"
