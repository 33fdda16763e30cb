"""Finished episodes on disk: JSON lines for people, their tokens in a safetensors file beside them.

    episodes/00001.jsonl        one line per episode; `samples` says where its tokens are
    episodes/00001.safetensors  token_ids int32[N], mask uint8[N], logprobs float32[N], spans int32[M, 4]

The samples of a part lie one behind the other in the four tensors: a sample's `tokens` is the half-open
range [first, last) of its tokens, `spans` that of its rows of spans (whose positions count from the start of
the sample). The tokens of a line are durable before the line is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import queue
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollhook.durable import (
    cannot_write,
    check_schema,
    from_json,
    fsync_directory,
    to_json,
    write_all,
    write_atomic,
)
from rollhook.errors import RollhookError, RunError
from rollhook.failpoints import fail
from rollhook.records import SCHEMA_VERSION, EpisodeRecord, Outcome, Sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

#: tensor name -> its type; `spans` has four columns, the others one dimension
TENSORS = {"token_ids": np.int32, "mask": np.uint8, "logprobs": np.float32, "spans": np.int32}
_META = ("leaf", "group_id", "task_id", "reward", "outcome", "components")

Tensors = dict[str, "NDArray[Any]"]
_Episode = tuple[EpisodeRecord, Sequence[Sample]]


class EpisodeStore:
    """Appends finished episodes; encodes and writes on a thread of its own.

    `append` returns at once; what it was given must not be changed afterwards. `flush` makes everything
    durable. A part of `part_bytes` of tokens or of lines is closed by the flush that finds it so. Several
    stores, also on several machines, may write into one directory.
    """

    def __init__(self, directory: Path, *, part_bytes: int = 4 << 20, write_bytes: int = 16 << 20) -> None:
        self.directory = directory
        self._part_bytes = part_bytes
        self._write_bytes = write_bytes
        self._queue: queue.SimpleQueue[_Episode | Future[None] | None] = queue.SimpleQueue()
        self._part: _Part | None = None
        self._error: RollhookError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self._thread.start()

    def append(self, record: EpisodeRecord, samples: Sequence[Sample]) -> None:
        """Take a finished episode and its samples; durable after the next `flush`.

        Raises ValueError for a number that is not finite or a sample that is not this episode's, RunError
        when episodes cannot be written any more.
        """
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RunError(f"{self.directory}: the episodes of this attempt are closed")
        _check(record, samples)
        self._queue.put((record, samples))

    def flush(self) -> None:
        """Block until all that was appended is durable; RunError when it cannot be written."""
        self._request().result()

    async def commit(self) -> None:
        """Do what `flush` does without blocking the event loop."""
        await asyncio.shield(asyncio.wrap_future(self._request()))

    def close(self) -> None:
        """Flush and end; safe to call twice."""
        if not self._closed:
            done = self._request()
            self._closed = True
            self._queue.put(None)
            self._thread.join()
            done.result()

    def _request(self) -> Future[None]:
        done: Future[None] = Future()
        if self._closed:
            done.set_result(None)
        else:
            self._queue.put(done)
        return done

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            error = self._error or self._handle(item)
            if error is not None and self._error is None:
                logger.error("%s", error)
                self._error = error
            if isinstance(item, Future):
                item.set_exception(error) if error is not None else item.set_result(None)

    def _handle(self, item: _Episode | Future[None]) -> RollhookError | None:
        try:
            if isinstance(item, Future):
                self._write()
            else:
                self._add(*item)
        except RollhookError as error:
            return error
        except Exception as error:
            logger.exception("the episodes of this attempt cannot be written any more")
            return RunError(
                f"{self.directory}: an episode cannot be written: {type(error).__name__}: {error}"
            )
        return None

    def _add(self, record: EpisodeRecord, samples: Sequence[Sample]) -> None:
        if self._part is None:
            self._part = _Part.open(self.directory)
        self._part.add(record, samples)
        if self._part.pending_bytes >= self._write_bytes:
            self._write()

    def _write(self) -> None:
        if self._part is not None:
            self._part.write()
            if max(self._part.token_bytes, self._part.size) >= self._part_bytes:
                self._part = None


class _Part:
    """The part that is being written: its tokens so far, and the lines that are not on disk yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token_bytes = 0
        self.pending_bytes = 0
        self.size = 0
        self._lines: list[bytes] = []
        self._arrays: dict[str, list[NDArray[Any]]] = defaultdict(list)
        self._tokens = self._spans = 0

    @classmethod
    def open(cls, directory: Path) -> _Part:
        """Take the next free number."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            number = max((int(p.stem) for p in directory.glob("*.jsonl") if p.stem.isdecimal()), default=0)
            while True:
                number += 1
                path = directory / f"{number:05d}.jsonl"
                try:
                    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
                    break
                except FileExistsError:
                    continue
            fail("episodes.after_open")
            fsync_directory(directory)
        except OSError as error:
            raise cannot_write(directory, error) from error
        return cls(path)

    def add(self, record: EpisodeRecord, samples: Sequence[Sample]) -> None:
        places = []
        for sample in samples:
            for name, dtype in TENSORS.items():
                array = np.ascontiguousarray(getattr(sample, name), dtype=dtype)
                self._arrays[name].append(array.reshape(-1, 4) if name == "spans" else array)
                self.token_bytes += array.nbytes
            first, first_span = self._tokens, self._spans
            self._tokens += len(sample.token_ids)
            self._spans += len(sample.spans)
            place: dict[str, Any] = {key: getattr(sample, key) for key in _META}
            place["components"] = dict(sample.components)
            places.append(place | {"tokens": [first, self._tokens], "spans": [first_span, self._spans]})
        line = to_json({**_shallow(record), "samples": places}) + b"\n"
        self._lines.append(line)
        self.pending_bytes += len(line) + sum(13 * len(sample.token_ids) for sample in samples)

    def write(self) -> None:
        """Make everything added so far durable: tokens first, then the lines."""
        if not self._lines:
            return
        from safetensors.numpy import save

        fail("episodes.before_tokens")
        joined = {name: np.concatenate(arrays) for name, arrays in self._arrays.items()}
        if joined:
            metadata = {"schema": str(SCHEMA_VERSION), "format": "rollhook.episodes"}
            write_atomic(self.path.with_suffix(".safetensors"), save(joined, metadata=metadata))
            self._arrays = defaultdict(list, {name: [array] for name, array in joined.items()})
        data = b"".join(self._lines)
        fail("episodes.before_lines")
        try:
            _append(self.path, data, self.size)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        fail("episodes.after_lines")
        self.size += len(data)
        self._lines.clear()
        self.pending_bytes = 0


def read_records(directory: Path) -> Iterator[EpisodeRecord]:
    """Yield the episodes in the order in which they finished, part by part, a torn last line dropped.

    Raises RunError, with file and line, for a line that is damaged or of a later schema.
    """
    for path in _parts(directory):
        for number, row in enumerate(_rows(path), start=1):
            try:
                record = _record(row)
            except (KeyError, TypeError, ValueError) as error:
                raise RunError(f"{path}, line {number}: not a whole episode ({error!r})") from error
            yield record


def locate(directory: Path) -> dict[str, Path]:
    """Return the part that holds each episode, by id; RunError as `read_records` raises it."""
    return {row["episode_id"]: path for path in _parts(directory) for row in _rows(path)}


def read_samples(
    directory: Path, episode_ids: Collection[str] | None = None, parts: Collection[Path] | None = None
) -> Iterator[Sample]:
    """Yield the samples of these episodes (None: of all), part by part; `parts`: look in these only.

    Raises RunError when a line names tokens that are not there.
    """
    wanted = None if episode_ids is None else frozenset(episode_ids)
    for path in _parts(directory):
        if parts is not None and path not in parts:
            continue
        rows = [row for row in _rows(path) if wanted is None or row["episode_id"] in wanted]
        if any(row["samples"] for row in rows):
            tensors = read_tensors(path.with_suffix(".safetensors"))
            for row in rows:
                for place in row["samples"]:
                    yield _sample(path, row["episode_id"], place, tensors)


def read_tensors(path: Path) -> Tensors:
    """Return the tensors of a part; RunError when the file is damaged, absent or of a later schema."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            schema = int((file.metadata() or {}).get("schema", 0))
            check_schema(schema, SCHEMA_VERSION, path)
            tensors = {name: file.get_tensor(name) for name in TENSORS}
    except (OSError, SafetensorError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    return tensors


def _parts(directory: Path) -> list[Path]:
    return sorted(
        (path for path in directory.glob("*.jsonl") if path.stem.isdecimal()),
        key=lambda path: int(path.stem),
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = _loads(line)
            check_schema(row["schema"], SCHEMA_VERSION, path)
            if not {"episode_id", "samples"} <= row.keys():
                raise KeyError("it has no episode_id or no samples")
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) - 1:
                logger.warning("%s, line %d: torn by a crash, dropped", path, number)
                return
            raise RunError(f"{path}, line {number}: not an episode ({error})") from error
        yield row


def _record(row: Mapping[str, Any]) -> EpisodeRecord:
    known = {field.name: row[field.name] for field in dataclasses.fields(EpisodeRecord) if field.name in row}
    known["outcome"] = Outcome(**row["outcome"])
    known["messages"] = tuple(row["messages"])
    known["warnings"] = tuple(row["warnings"])
    known["versions"] = None if row["versions"] is None else tuple(row["versions"])
    return EpisodeRecord(**known)


def _sample(path: Path, episode_id: str, place: Mapping[str, Any], tensors: Tensors) -> Sample:
    (first, last), (first_span, last_span) = place["tokens"], place["spans"]
    if last > len(tensors["token_ids"]) or last_span > len(tensors["spans"]):
        raise RunError(
            f"{path}: the tokens of episode {episode_id} are not in the safetensors file beside it"
        )
    return Sample(
        episode_id=episode_id,
        token_ids=tensors["token_ids"][first:last],
        mask=tensors["mask"][first:last],
        logprobs=tensors["logprobs"][first:last],
        spans=tensors["spans"][first_span:last_span],
        **{key: place[key] for key in _META},
    )


def _check(record: EpisodeRecord, samples: Sequence[Sample]) -> None:
    numbers = {
        "reward": record.reward,
        "outcome.reward": record.outcome.reward,
        **record.components,
        **record.timings,
        **{f"sample {sample.leaf}": sample.reward for sample in samples},
    }
    for name, value in numbers.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"episode {record.episode_id}: {name} is {value}, which is not a finite number")
    for sample in samples:
        sizes = {len(sample.token_ids), len(sample.mask), len(sample.logprobs)}
        if sample.episode_id != record.episode_id or len(sizes) != 1:
            raise ValueError(
                f"episode {record.episode_id}: a sample of {sample.episode_id} has sizes {sizes}"
            )


def _shallow(record: EpisodeRecord) -> dict[str, Any]:
    row = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    for name in ("components", "detail", "timings"):
        row[name] = dict(row[name])
    for name in ("messages", "warnings"):
        row[name] = list(row[name])
    return row | {"outcome": dataclasses.asdict(record.outcome)}


def _append(path: Path, data: bytes, size: int) -> None:
    """Append durably; on failure cut the file back to `size` bytes."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        write_all(fd, data)
        os.fsync(fd)
    except OSError:
        os.ftruncate(fd, size)
        raise
    finally:
        os.close(fd)


def _loads(line: bytes) -> dict[str, Any]:
    row = from_json(line)
    if not isinstance(row, dict):
        raise TypeError("not an object")
    return row
