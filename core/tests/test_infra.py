"""An infra file beside a recipe: where a run goes, apart from what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollhook.cli.main import _infra_last
from rollhook.recipe.load import Loaded, read_recipe

RECIPE = "name: demo\nseed: 7\nlauncher: {use: local}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(RECIPE)
    return path


def said(loaded: Loaded) -> str:
    return "\n".join(map(str, loaded.problems))


@pytest.mark.parametrize("text", ["use: far\nnodes: 4\n", "launcher:\n  use: far\n  nodes: 4\n"])
def test_it_fills_the_launcher_section_with_or_without_its_name(
    recipe: Path, tmp_path: Path, text: str
) -> None:
    infra = tmp_path / "any.yaml"
    infra.write_text(text)
    loaded = read_recipe(recipe, [f"infra={infra}"])
    assert loaded.problems == []
    assert loaded.resolved["launcher"] == {"use": "far", "nodes": 4}
    assert loaded.resolved["seed"] == 7
    assert loaded.origins["launcher.nodes"].startswith(str(infra))


def test_it_is_found_by_its_profile_and_may_refer_to_the_recipe(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "demo.gb300.infra.yaml").write_text("use: far\nnodes: ${seed}\nown: ${launcher.nodes}\n")
    loaded = read_recipe(recipe, ["infra=gb300"])
    assert loaded.resolved["launcher"] == {"use": "far", "nodes": 7, "own": 7}
    assert loaded.name.endswith("demo.yaml")


def test_overrides_win_whatever_their_order(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "demo.x.infra.yaml").write_text("use: far\nqueue: file\n")
    for given in (["infra=x", "launcher.queue=cli"], ["launcher.queue=cli", "infra=x"]):
        assert read_recipe(recipe, given).resolved["launcher"]["queue"] == "cli"


def test_it_extends_others_relative_to_itself_and_keeps_anchors_to_itself(
    recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "base.yaml").write_text("use: far\nqueue: base\nnodes: 1\n")
    (tmp_path / "demo.x.infra.yaml").write_text(
        "extends: site/base.yaml\n_pod: &pod {cpu: 8}\nnodes: 2\nhead: *pod\n"
    )
    loaded = read_recipe(recipe, ["infra=x"])
    assert loaded.problems == []
    assert loaded.resolved["launcher"] == {"use": "far", "queue": "base", "nodes": 2, "head": {"cpu": 8}}


def test_an_absent_one_and_one_with_keys_of_a_recipe_are_said(recipe: Path, tmp_path: Path) -> None:
    assert "'gb200' is no infra file, and" in said(read_recipe(recipe, ["infra=gb200"]))
    (tmp_path / "demo.x.infra.yaml").write_text("launcher: {use: far}\nmodel: {path: /m}\n")
    assert "fills `launcher` alone" in said(read_recipe(recipe, ["infra=x"]))


def test_a_shell_variable_that_is_not_escaped_is_said_so(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "demo.x.infra.yaml").write_text('use: far\nsetup: "echo ${HOME:-x}"\n')
    assert "escape" in said(read_recipe(recipe, ["infra=x"])).lower() or "\\${" in said(
        read_recipe(recipe, ["infra=x"])
    )
    (tmp_path / "demo.x.infra.yaml").write_text("use: far\nsetup: 'echo \\${HOME:-x}'\n")
    assert read_recipe(recipe, ["infra=x"]).resolved["launcher"]["setup"] == "echo ${HOME:-x}"


def test_the_option_is_the_override_behind_the_recipe() -> None:
    assert _infra_last(["run", "--infra", "f", "r", "a=1"]) == ["run", "r", "a=1", "infra=f"]
    assert _infra_last(["plan", "r", "--infra=f", "-o", "d"]) == ["plan", "r", "-o", "d", "infra=f"]
    assert _infra_last(["x", "--", "--infra", "f"]) == ["x", "--", "--infra", "f"]
