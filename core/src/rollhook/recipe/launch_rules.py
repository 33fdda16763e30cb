"""What must hold between a recipe and the launcher of its run, whatever the machine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rollhook.launcher import JobKeys
from rollhook.recipe import paths
from rollhook.recipe.composition import Composition, asks_from, given, idle, use_name
from rollhook.recipe.problem import Problem

_USER = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<user>[^/\s@]*)@", re.IGNORECASE)


def launcher(c: Composition) -> Iterator[Problem]:
    """Where the run's files are, if the job's nodes do not share them with whoever submits it."""
    part = c.part("launcher")
    if part is None or part.cls is None or part.config is None or part.cls.in_process or c.evaluating:
        return
    built = c.parts.build(part)
    if isinstance(built, Problem):
        yield built
    elif not built.shares_files and not c.recipe.storage.root.startswith("/"):
        yield Problem(
            "storage.root",
            f"{c.recipe.storage.root!r} is relative, and launcher {part.name} runs where it is not seen",
            hint="set it to an absolute directory that all nodes see",
        )


def code(c: Composition) -> Iterator[Problem]:
    """Where a job's own code comes from."""
    part = c.part("launcher")
    keys = part.config if part is not None else None
    if not isinstance(keys, JobKeys):
        return
    if keys.code != "image" and not keys.code_path:
        yield Problem(
            "launcher.code_path", f"is missing, which code {keys.code} needs", hint="name the directory"
        )
    if keys.code == "image":
        reason = "with code: image the code is what is installed on the nodes"
        yield from idle(c, ["launcher.code_path"], c.layer("launcher.code"), reason)


def hosted(c: Composition) -> Iterator[Problem]:
    """What a framework that hosts us needs, and the keys that it would not read."""
    part, r = c.part("trainer"), c.recipe
    if not c.trains or part is None or part.cls is None or not part.cls.hosted:
        return
    launcher = c.part("launcher")
    if launcher and launcher.cls and launcher.cls.in_process:
        yield Problem(
            "launcher.use",
            f"trainer {part.name} runs as a job, and launcher {launcher.name} submits none",
            hint="set launcher to one that does, e.g. slurm, ray or kuberay",
        )
    if asks_from(c) not in ("", "process"):
        yield Problem(
            "agent.use",
            f"{use_name(r.agent)} asks the policy over HTTP, and under trainer {part.name} there is no such "
            "face",
            hint="choose an agent that asks in its own process, e.g. shell",
        )
    if c.loaded.locked is not None:
        return
    refused = [key for key in given(c) if part.cls.treats(key) == "refused"]
    yield from idle(c, refused, c.layer("trainer.use"), f"trainer {part.name} has no counterpart of it")


def addresses(c: Composition) -> Iterator[Problem]:
    """Addresses that carry a password: they are shown in locks, logs and lists of processes."""
    for path, value in paths.leaves(c.loaded.resolved):
        found = _USER.match(value) if isinstance(value, str) else None
        if found is not None and (found["scheme"].startswith("http") or ":" in found["user"]):
            yield Problem(
                paths.text(path),
                "is an address with a user or password before its @, which all who see the recipe would see",
                hint="take that out, and give the secret by reference in the key that is for it",
            )
