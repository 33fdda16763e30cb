"""`checkpoint.load_from`: a directory of weights, or a run, which stands for its newest checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rollhook.errors import RollhookError, UsageError
from rollhook.recipe.problem import Problem

if TYPE_CHECKING:
    from rollhook.recipe.interpolate import Resolved

KEY = ("checkpoint", "load_from")


def resolve_start(resolved: Resolved) -> list[Problem]:
    """Put the directory that `checkpoint.load_from` means in its place, or say why there is none.

    The result of a recipe that has yet to run stays as it is.
    """
    section = resolved.data.get(KEY[0])
    name = section.get(KEY[1]) if isinstance(section, dict) else None
    if not isinstance(name, str) or name.startswith("needs:") or KEY in resolved.unresolved:
        return []
    try:
        resolved.data[KEY[0]][KEY[1]] = str(find_weights(name))
    except RollhookError as error:
        resolved.unresolved.add(KEY)
        return [Problem(".".join(KEY), str(error), scope="site")]
    return []


def find_weights(name: str) -> Path:
    """Return the directory of weights that a name means: itself, or the newest checkpoint of a run.

    `name` is a directory of weights, the directory of a run, or a run's id. Raises UsageError where nothing
    is there, RunError for a run that is unknown or damaged.
    """
    from rollhook.checkpoints import MARKER, CheckpointStore
    from rollhook.rundir import RunDir

    path = Path(name).expanduser()
    if not path.is_dir() and (os.sep in name or name.startswith((".", "~"))):
        raise UsageError(f"{name!r} does not exist here")
    if path.is_dir() and not (path / "attempts").is_dir():
        path = path.resolve()
        if not (path / MARKER).is_file() and (path.parent.parent / "attempts").is_dir():
            raise UsageError(
                f"{name!r} is no complete checkpoint (it has no {MARKER}); name another, or the run"
            )
        if not (path / MARKER).is_file() and not (path / "config.json").is_file():
            raise UsageError(f"{name!r} holds no weights (it has no config.json)")
        return path
    run = RunDir.find(path if path.is_dir() else name)
    newest = CheckpointStore(run.checkpoints).newest()
    if newest is None:
        raise UsageError(f"run {run.run_id} has committed no step, so there are no weights of it")
    return newest.path
