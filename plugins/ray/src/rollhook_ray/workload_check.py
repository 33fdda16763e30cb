"""What a workload needs on shared storage before it is submitted, looked at in one go."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rollhook.errors import UsageError
from rollhook_ray import prepare
from rollhook_ray.workload import JobSpec
from rollhook_ray.workload_render import MODULES, PACKAGE, data_files


def missing(spec: JobSpec) -> list[str]:
    """Return all that the shared root lacks for a job, a sentence each; changes nothing."""
    root = Path(spec.shared_root)
    if not root.is_dir():
        return [
            f"shared_root {root} is not here: submit from a machine that sees it, such as the head node, "
            f"or make it there with `rollhook workload prepare --root {root}`"
        ]
    return [*_of_tree(root), *_of_code(spec), *_of_model(Path(spec.model)), *_of_data(spec)]


def _of_tree(root: Path) -> Iterator[str]:
    if not os.access(root, os.W_OK | os.X_OK):
        yield f"shared_root {root} cannot be written by this user"
    absent = [name for name in prepare.TREE if not (root / name).is_dir()]
    if absent:
        yield f"{root} lacks {', '.join(absent)}: run `rollhook workload prepare --root {root}`"


def _of_code(spec: JobSpec) -> Iterator[str]:
    code = Path(spec.code_path)
    module = MODULES[spec.workload]
    file = code.joinpath(*module.split(".")).with_suffix(".py")
    if not code.is_dir():
        yield f"code_path {code} is not there: `rollhook code snapshot CHECKOUT --id {code.name}` makes it"
    elif not (code / PACKAGE).is_dir():
        yield f"code_path {code} holds no package {PACKAGE}"
    elif not file.is_file():
        yield f"code_path {code} has no {module}, so this verl cannot do {spec.workload}"
    reward = (spec.reward_fn_path or "").partition(":")[0]
    if reward and not Path(reward).is_file():
        yield f"reward_fn_path {reward} is no file"


def _of_model(model: Path) -> Iterator[str]:
    if not model.is_dir():
        yield f"model {model} is not there: `rollhook workload prepare --model DIRECTORY` brings one"
    elif not (model / "config.json").is_file():
        yield f"model {model} has no config.json"
    elif (model / prepare.MARKER).exists() and prepare.read_marker(model) is None:
        yield f"model {model} is half done: prepare it again"


def _of_data(spec: JobSpec) -> Iterator[str]:
    train, other = data_files(spec)
    files: Sequence[str] = [train] if spec.workload == "sft" or other == train else [train, other]
    look: Callable[[Path], str] = prepare.sft_problem if spec.workload == "sft" else prepare.rl_problem
    for file in files:
        if not Path(file).is_file():
            yield f"dataset {file} is not there: `rollhook workload prepare --data FILE.jsonl` makes it"
            continue
        try:
            if wrong := look(Path(file)):
                yield f"dataset {wrong}"
        except UsageError as error:
            yield f"dataset {file} was not looked into: {error}"
