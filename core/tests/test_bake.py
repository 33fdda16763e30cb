"""`rollhook sandboxes bake`: what the sandboxes of tasks need is made before a run waits for it."""

import asyncio
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollhook.cli.main import main
from rollhook.errors import SandboxError
from rollhook.runtime.baking import Baked, Wanted, bake_all
from rollhook.sandbox.backend import SandboxSpec
from rollhook.testing.distributions import write_distribution
from rollhook.testing.scripted import ScriptedBackend, ThrottledError

MODULE = """
    import asyncio
    from rollhook import Component, Config, hookimpl
    from rollhook.environment import Box, Environment, Episode, Task
    from rollhook.errors import SandboxError
    from rollhook.sandbox.backend import SandboxSpec
    from rollhook.testing.scripted import ScriptedBackend

    baked, asked, broken = {}, [], set()

    class Ovens(ScriptedBackend):
        capabilities = frozenset({"image", "isolation"})

        def __init__(self, config, context):
            super().__init__()

        async def bake(self, spec):
            self.refuse(spec)
            asked.append(spec.image)
            await asyncio.sleep(0)
            if spec.image in broken:
                raise SandboxError(f"building {spec.image} failed: E: Unable to locate package", kind="user")
            return baked.setdefault(spec.image, f"snapshot-{spec.image}")

    class Meal(Episode):
        def __init__(self, task):
            self.boxes = {"main": Box(SandboxSpec(image=task.payload))}
            if task.id == "t3":
                self.boxes["judge"] = Box(SandboxSpec(image="judge"), when="verify")

        def phases(self):
            raise NotImplementedError

    class Meals(Environment):
        def tasks(self, split=None):
            found = [
                Task("t0", "d0", "train", "f", payload="debian"),
                Task("t1", "d1", "train", "f", payload="debian"),
                Task("t2", "d2", "train", "f", payload="alpine"),
                Task("t3", "d3", "test", "f", payload="debian"),
                Task("t4", "d4", "other", "f", payload=None, problem="it has no task.toml"),
            ]
            return [task for task in found if split in (None, task.split)]

        def episode(self, task, ctx):
            return Meal(task)

    @hookimpl
    def rollhook_sandboxes():
        return [Component("ovens", Config, "ovens:Ovens", "for a test")]

    @hookimpl
    def rollhook_environments():
        return [Component("meals", Config, "ovens:Meals", "for a test")]
"""


@pytest.fixture
def ovens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    site = tmp_path / "site"
    write_distribution(
        site,
        "ovens",
        entry_points={"sandbox.ovens": "ovens", "environment.meals": "ovens"},
        modules={"ovens": textwrap.dedent(MODULE)},
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    import ovens  # type: ignore[import-not-found]

    yield ovens
    sys.modules.pop("ovens", None)


def rollhook(*argv: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == code


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "name: demo\nenvironment: {use: meals}\nagent: nop\nsandbox: ovens\n"
        "evaluation: {every: 1, split: test}\n"
    )
    return str(path)


def test_each_distinct_sandbox_of_a_recipes_splits_is_baked_once(
    ovens: Any, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rollhook("sandboxes", "bake", recipe, "--json")
    found = json.loads(capsys.readouterr().out)
    rows = {row["image"]: row for row in found["baked"]}
    assert {image: row["tasks"] for image, row in rows.items()} == {
        "debian": ["t0", "t1", "t3"],
        "alpine": ["t2"],
        "judge": ["t3"],
    }
    assert {row["name"] for row in rows.values()} == {f"snapshot-{image}" for image in rows}
    assert sorted(ovens.asked) == ["alpine", "debian", "judge"]
    assert found["without_a_sandbox"] == {}


def test_a_pack_is_baked_whole_and_what_has_a_problem_is_named(
    ovens: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rollhook("sandboxes", "bake", "meals", "--backend", "ovens", code=1)
    err = capsys.readouterr().err
    assert "alpine of t2: snapshot-alpine (" in err
    assert "FAILED: task t4: it has no task.toml" in err
    assert "3 baked, 1 failed" in err
    ovens.asked.clear()
    rollhook("sandboxes", "bake", "meals", "--backend", "ovens", "--task", "t2", "--split", "train")
    assert ovens.asked == ["alpine"]


def test_one_that_fails_is_named_and_stops_none_and_the_same_command_goes_on(
    ovens: Any, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ovens.broken.add("debian")
    rollhook("sandboxes", "bake", recipe, "--concurrency", "1", code=1)
    err = capsys.readouterr().err
    assert "debian of t0, t1, t3: FAILED: building debian failed: E: Unable to locate package" in err
    assert set(ovens.baked) == {"alpine", "judge"}
    ovens.broken.clear()
    rollhook("sandboxes", "bake", recipe)
    assert "3 baked, 0 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["meals"], "meals names no sandbox backend: add --backend NAME"),
        (["meals", "steps=1", "--backend", "ovens"], "steps=1: overrides go with a recipe"),
        (["nothing", "--backend", "ovens"], "'nothing' is no directory, pack or environment"),
    ],
)
def test_wrong_usage_is_told_in_a_sentence(
    ovens: Any, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rollhook("sandboxes", "bake", *argv, code=2)
    assert said in capsys.readouterr().err


def test_a_recipe_without_a_sandbox_is_told(
    ovens: Any, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rollhook("sandboxes", "bake", recipe, "~sandbox", code=2)
    assert "has no sandbox or no environment" in capsys.readouterr().err
    rollhook("sandboxes", "bake", recipe, "~sandbox", "--backend", "ovens")


class Kitchen(ScriptedBackend):
    """Fails as scripted; counts how many bake at once."""

    def __init__(self, errors: list[Exception]) -> None:
        super().__init__()
        self.errors = errors
        self.gate = asyncio.Event()

    async def bake(self, spec: SandboxSpec) -> str:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if self.errors:
            raise self.errors.pop(0)
        return "made"


async def baked(backend: ScriptedBackend, count: int = 1, **options: Any) -> tuple[list[Baked], list[float]]:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    wanted = [Wanted(str(n), SandboxSpec(image=f"i{n}"), [f"t{n}"]) for n in range(count)]
    given = {"concurrency": 3, "retries": 2, **options}
    return await bake_all(backend, wanted, finished=lambda row: None, sleep=sleep, **given), slept


async def test_at_most_so_many_are_baked_at_once() -> None:
    backend = Kitchen([])
    rows, _ = await baked(backend, 10)
    assert (len(rows), backend.most_under_way) == (10, 3)


async def test_what_may_help_is_tried_again_and_what_may_not_is_not() -> None:
    rows, slept = await baked(Kitchen([ThrottledError("slow"), ThrottledError("slow")]))
    assert (rows[0].name, len(slept)) == ("made", 2)
    rows, slept = await baked(Kitchen([ThrottledError("slow")] * 3))
    assert (rows[0].error, len(slept)) == ("slow", 2)
    rows, slept = await baked(Kitchen([SandboxError("no such image", kind="user")]))
    assert (rows[0].error, slept) == ("no such image", [])
    rows, _ = await baked(Kitchen([KeyError("x")]))
    assert rows[0].error == "KeyError: 'x'"
