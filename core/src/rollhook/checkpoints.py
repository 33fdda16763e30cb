"""Checkpoints: a directory per step, complete only once its marker is durable.

    checkpoints/00000012/  what the trainer saved  checkpoint.json

`checkpoint.json` is the marker, written last. A directory without it is a crash's leftover.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rollhook.durable import cannot_write, check_schema, fsync_directory, fsync_tree, to_json, write_atomic
from rollhook.errors import RunError
from rollhook.failpoints import fail

SCHEMA_VERSION = 1
MARKER = "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """A committed step: `version` of the weights, the episodes trained since the previous one, and where
    the journal stood. `extra` is the driver's own.
    """

    path: Path
    step: int
    version: int
    episode_ids: Sequence[str]
    journal_seq: int
    attempt: int | None
    extra: Mapping[str, Any]


class CheckpointStore:
    """The checkpoints of a run. Every method blocks on the disk: call them off the event loop.

    `attempt` is noted in the markers. All raise RunError when the disk is full or not writable; what was
    committed before stays intact.
    """

    def __init__(self, directory: Path, *, attempt: int | None = None) -> None:
        self.directory = directory
        self._attempt = attempt
        self._open: set[Path] = set()

    def begin(self, step: int) -> Path:
        """Return a new empty directory to save step `step` into."""
        path = self.directory / f".{step:08d}.{secrets.token_hex(4)}.tmp"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except OSError as error:
            raise cannot_write(path, error) from error
        fail("checkpoint.after_begin")
        self._open.add(path)
        return path

    def commit(
        self,
        path: Path,
        step: int,
        version: int,
        episode_ids: Sequence[str],
        journal_seq: int,
        extra: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Make what `begin` returned durable, name it after its step, and write the marker last.

        A leftover without a marker under that name is replaced; a committed step is not (RunError).
        """
        final = self.directory / f"{step:08d}"
        if (final / MARKER).exists():
            raise RunError(f"step {step} is committed already in {final}; a step is never committed twice")
        marker = {
            "schema": SCHEMA_VERSION,
            "step": step,
            "version": version,
            "episode_ids": list(episode_ids),
            "journal_seq": journal_seq,
            "attempt": self._attempt,
            "extra": dict(extra or {}),
            "committed_at": time.time(),
        }
        try:
            (path / MARKER).unlink(missing_ok=True)  # a trainer may copy all that it was set up from
            fsync_tree(path)
            fail("checkpoint.before_rename")
            if final.exists():
                self._remove(final)
            os.rename(path, final)
            fsync_directory(self.directory)
            fail("checkpoint.before_marker")
            write_atomic(final / MARKER, to_json(marker, indent=True) + b"\n")
            fail("checkpoint.after_marker")
        except OSError as error:
            raise cannot_write(final, error) from error
        self._open.discard(path)
        return read_checkpoint(final)

    def all(self) -> list[Checkpoint]:
        """Return the committed checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        paths = [path for path in self.directory.iterdir() if path.name.isdecimal()]
        found = [read_checkpoint(path) for path in paths if (path / MARKER).exists()]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def newest(self) -> Checkpoint | None:
        """Return the committed checkpoint of the highest step; None when there is none."""
        return next(reversed(self.all()), None)

    def prune(self, keep: int, in_use: Collection[Path] = ()) -> None:
        """Remove all but the `keep` newest committed checkpoints, those in use, and what crashes left."""
        kept = {checkpoint.path for checkpoint in self.all()[-keep:]} | set(in_use)
        for path in list(self.directory.iterdir()) if self.directory.is_dir() else ():
            ours = path.name.isdecimal() or (path.name.startswith(".") and path.name.endswith(".tmp"))
            if ours and path not in kept and path not in self._open:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a directory; its marker goes first, so that half of one never looks complete."""
        try:
            if (path / MARKER).exists():
                (path / MARKER).unlink()
                fsync_directory(path)
            fail("checkpoint.amid_removal")
            shutil.rmtree(path)
        except OSError as error:
            raise RunError(f"{path} cannot be removed: {error.strerror}") from error


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a directory; RunError when it is not complete or of a later schema."""
    try:
        marker = orjson.loads((path / MARKER).read_bytes())
    except FileNotFoundError:
        raise RunError(f"{path} is no complete checkpoint (it has no {MARKER})") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path / MARKER} cannot be read: {error}") from error
    try:
        check_schema(marker["schema"], SCHEMA_VERSION, path / MARKER)
        return Checkpoint(
            path,
            marker["step"],
            marker["version"],
            tuple(marker["episode_ids"]),
            marker["journal_seq"],
            marker["attempt"],
            marker["extra"],
        )
    except (KeyError, TypeError) as error:
        raise RunError(
            f"{path / MARKER} is not the marker of a checkpoint; remove {path}, and the one before it counts"
        ) from error
