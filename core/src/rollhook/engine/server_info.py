"""What an engine says of itself and of its load, typed, over the releases of SGLang that differ in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollhook.router import Worker

#: the release that renamed `data_parallel_rank`; some later ones ignore the old name without a word
_RENAMED_RANK = (0, 5, 10)


@dataclass(frozen=True)
class ServerInfo:
    """An engine's description of itself.

    `version` is the release of the server, empty where it tells none; `dp_size` the number of its
    data-parallel ranks; `fields` all that it said.
    """

    version: str = ""
    dp_size: int = 1
    dp_attention: bool = False
    tp_size: int = 1
    model_path: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def workers(self, url: str) -> list[Worker]:
        """Return the engine's workers: one per rank, or one without a rank."""
        return [Worker(url)] if self.dp_size == 1 else [Worker(url, rank) for rank in range(self.dp_size)]


@dataclass(frozen=True)
class RankLoad:
    """The load of one data-parallel rank: requests running and waiting, tokens in use."""

    dp_rank: int
    running: int
    waiting: int
    tokens: int


def parse_server_info(data: Mapping[str, Any]) -> ServerInfo:
    """Return an engine's description. Raises ValueError or TypeError for numbers that are none.

    From 0.5.22 on SGLang counts the ranks of data-parallel attention apart: it serves
    `dp_size * attn_dp_size` of them.
    """
    attention = int(data.get("attn_dp_size") or 1)
    ranks = int(data.get("dp_size") or 1) * attention
    if ranks < 1:
        raise ValueError(f"dp_size {ranks} is below 1")
    return ServerInfo(
        version=str(data.get("version") or ""),
        dp_size=ranks,
        dp_attention=bool(data.get("enable_dp_attention")) or attention > 1,
        tp_size=int(data.get("tp_size") or 1),
        model_path=str(data.get("model_path") or ""),
        fields=data,
    )


def parse_loads(data: Any) -> list[RankLoad]:
    """Return the loads of `/v1/loads` or of the older `/get_load`.

    Raises KeyError, ValueError or TypeError for anything else.
    """
    if isinstance(data, Mapping):
        return [
            RankLoad(
                int(row["dp_rank"]),
                int(row["num_running_reqs"]),
                int(row["num_waiting_reqs"]),
                int(row["num_used_tokens"]),
            )
            for row in _rows(data["loads"])
        ]
    return [
        RankLoad(
            int(row["dp_rank"]),
            int(row["num_reqs"]) - int(row["num_waiting_reqs"]),
            int(row["num_waiting_reqs"]),
            int(row["num_tokens"]),
        )
        for row in _rows(data)
    ]


def dp_rank_field(version: str) -> str:
    """Return the field of `/generate` that takes the rank in this release of SGLang."""
    return "routed_dp_rank" if release(version) >= _RENAMED_RANK else "data_parallel_rank"


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, without what follows them; empty for what is none."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()


def _rows(data: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(data, list):
        raise TypeError("the loads are no list")
    return data
