"""Which pocket tasks there are: drawn, split by argument combination, and turned into files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollhook_tbench2.pocket.families import FAMILIES, Args, Family, Work
from rollhook_tbench2.pocket.stream import Stream

#: draws without a new combination after which a family counts as exhausted
_GIVE_UP = 100_000


@dataclass(frozen=True)
class PocketTask:
    """One task of the pack; `phrasing` is the index of its instruction's wording."""

    id: str
    family: Family
    split: str
    args: Args
    phrasing: int
    work: Work

    @property
    def instruction(self) -> str:
        """What the policy is asked, one sentence."""
        return self.work.phrasings[self.phrasing]


def held_out(group: str, args: Args) -> bool:
    """Return whether a combination belongs to the held-out quarter, whatever the seed."""
    return hashlib.md5("|".join((group, *args)).encode(), usedforsecurity=False).digest()[0] < 64


def draw_tasks(seed: int, train: int, heldout: int) -> Iterator[PocketTask]:
    """Yield `train` and `heldout` tasks per family; a smaller number gives the first of a larger one's."""
    for family in FAMILIES:
        yield from _family_tasks(family, seed, {"train": train, "heldout": heldout})


def _family_tasks(family: Family, seed: int, wanted: Mapping[str, int]) -> Iterator[PocketTask]:
    made = dict.fromkeys(wanted, 0)
    seen: set[Args] = set()
    for attempt in range(_GIVE_UP):
        if all(made[split] >= wanted[split] for split in wanted):
            return
        stream = Stream(seed, family.name, attempt)
        args = family.draw(stream)
        split = "heldout" if held_out(family.group, args) else "train"
        if args in seen:
            continue
        seen.add(args)
        if made[split] >= wanted[split]:
            continue
        work = family.work(args, Stream(seed, family.name, "files", *args))
        name = f"{family.name}-{split}-{made[split]:04d}"
        made[split] += 1
        yield PocketTask(name, family, split, args, stream.below(2), work)
    raise ValueError(f"family {family.name} has no {wanted} different argument combinations")


_TOML = """\
schema_version = "1.4"

[task]
name = "rollhook/pocket-{id}"

[metadata]
family = "{family}"
host_ok = true

[environment]
build_timeout_sec = 120.0
memory_mb = 512
network_mode = "no-network"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0
"""

_TEST = """\
#!/bin/sh
# Writes 1 to /logs/verifier/reward.txt if everything in solved holds, else 0.
holds() {{
  [ -f "$1" ] && [ ! -L "$1" ] && [ "$(head -c 4096 "$1")" = "$2" ]
}}
solved() {{
  cd /work || return 1
{checks}
}}
reward=0
if solved > /dev/null 2>&1; then reward=1; fi
[ -d /logs/verifier ] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
"""


def task_files(task: PocketTask) -> dict[str, tuple[bytes, int]]:
    """Return the files of a task directory: path -> (bytes, mode)."""
    checks = " &&\n".join(f"  {condition}" for condition in task.work.check)
    copy = "COPY files/ /work/\n" if task.work.files else ""
    files: dict[str, tuple[bytes, int]] = {
        "task.toml": (_TOML.format(id=task.id, family=task.family.name).encode(), 0o644),
        "instruction.md": (f"{task.instruction}\n".encode(), 0o644),
        "environment/Dockerfile": (
            f"FROM debian:12-slim\nENV LC_ALL=C\nWORKDIR /work\n{copy}".encode(),
            0o644,
        ),
        "tests/test.sh": (_TEST.format(checks=checks).encode(), 0o755),
        "solution/solve.sh": (f"#!/bin/sh\ncd /work || exit\n{task.work.command}\n".encode(), 0o755),
    }
    for path, data in task.work.files.items():
        files[f"environment/files/{path}"] = (data, 0o644)
    return files
