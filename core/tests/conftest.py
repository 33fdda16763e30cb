"""Throw-away distributions for the tests of loader, recipes and command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollhook import installed as metadata
from rollhook import plugins
from rollhook.cli import doctor
from rollhook.cli import plugins as cli_plugins
from rollhook.testing.distributions import write_distribution

TOY = "rollhook-toy"
TOY_NAMES = """
environment.room agent.talker agent.worker agent.caller agent.cheat agent.idle sandbox.box sandbox.bare
sandbox.wrapper sandbox.absent router.spread router.stick engine.generator engine.text trainer.learner
trainer.tuner launcher.here launcher.afar tracker.log pack.sand plugin.watcher
""".split()  # noqa: SIM905

BASE = """\
name: base
model: {path: some/model}
environment: room
agent: worker
sandbox: box
router: stick+spread
engine: generator
trainer: learner
launcher: here
"""

SFT = """\
name: toy-sft
model: {path: some/model}
router: spread
trainer: {use: learner, algorithm: sft, data: "pack:sand/rows.jsonl"}
launcher: here
steps: 20
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on `sys.path` for distributions; its modules are forgotten afterwards."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    yield directory
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(directory)):
            del sys.modules[name]


@pytest.fixture
def toys(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of recipes, the current one, with only the toy plugins and two toy recipes shipped."""
    source = (Path(__file__).parent / "toy_plugins.py").read_text()
    points = dict.fromkeys(TOY_NAMES, "rollhook_toy")
    write_distribution(
        site, TOY, entry_points=points, modules={"rollhook_toy": source}, requires=["rollhook>=0.1"]
    )
    only_toys(monkeypatch)
    recipes, shipped = tmp_path / "recipes", tmp_path / "shipped"
    recipes.mkdir()
    shipped.mkdir()
    (recipes / "base.yaml").write_text(BASE)
    (shipped / "toy-grpo.yaml").write_text(BASE.replace("name: base", "name: toy-grpo"))
    (shipped / "toy-sft.yaml").write_text(SFT)
    monkeypatch.setattr("rollhook.recipe.sources.shipped_directory", lambda: shipped)
    monkeypatch.chdir(recipes)
    return recipes


def only_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every distribution but the toys, so that messages do not depend on what is installed."""
    everything = metadata.installed

    def installed() -> list[metadata.EntryInfo]:
        return [entry for entry in everything() if entry.distribution.startswith(TOY)]

    for module in (metadata, plugins, cli_plugins, doctor):
        monkeypatch.setattr(module, "installed", installed)
