"""What a lock records of a machine, and how it is compared where it is run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollhook.cli.main import main
from rollhook.environment import Task
from rollhook.plugins import load
from rollhook.recipe import digests
from rollhook.recipe.check import check_recipe, compose
from rollhook.recipe.digests import digest_files, digest_tasks
from rollhook.recipe.facts import revisions, versions
from rollhook.recipe.lock import lock_text
from rollhook.recipe.problem import RecipeError
from rollhook.testing.distributions import write_distribution
from rollhook.testing.parts import needs_part

SENTINEL = "sk-sentinel-0123456789"


def lock(recipe: str, *overrides: str, name: str = "recipe.lock.yaml", **changes: Any) -> dict[str, Any]:
    """Write a recipe's lock, with some of its sections updated, and return it."""
    checked = check_recipe(recipe, overrides, site="here")
    assert checked.problems == []
    document: dict[str, Any] = yaml.safe_load(lock_text(checked.loaded, checked.plugins))
    for section, values in changes.items():
        document[section] = document[section] | values
    Path(name).write_text(yaml.safe_dump(document, sort_keys=False))
    return document


def model_of(directory: Path) -> str:
    directory.mkdir()
    (directory / "weights.bin").write_bytes(b"one")
    return f"model.path={directory}"


def test_a_lock_records_the_libraries_of_the_loaded_distributions(toys: Path, site: Path) -> None:
    for name in ("rollhook-toy-heavy", "some-torch", "an-extra"):
        requires = ["some_torch>=1", "an-extra; extra == 'x'", "absent>1"] if "toy" in name else []
        points = {"agent.heavy": "rollhook_heavy"} if "toy" in name else {}
        source = (site / "rollhook_toy.py").read_text().replace("talker=(", "heavy=(")
        modules = {"rollhook_heavy": source} if "toy" in name else {}
        write_distribution(site, name, entry_points=points, modules=modules, requires=requires, version="2.5")
    found = versions(load([("agent", "heavy")]))
    assert list(found) == ["python", "rollhook", "rollhook-toy-heavy", "some-torch"]
    assert found["some-torch"] == "2.5"


def test_an_extra_of_rollhook_that_a_distribution_asks_for_counts(toys: Path, site: Path) -> None:
    needs_part("ray")
    source = (site / "rollhook_toy.py").read_text().replace("talker=(", "heavy=(")
    points, modules = {"agent.heavy": "rollhook_heavy"}, {"rollhook_heavy": source}
    write_distribution(
        site, "rollhook-toy-heavy", entry_points=points, modules=modules, requires=["rollhook[ray]>=0.1"]
    )
    assert "ray" in versions(load([("agent", "heavy")]))


def test_no_secret_and_no_path_of_this_machine_is_in_a_lock(
    toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 5: a lock holds references to secrets, never their values."""
    monkeypatch.setenv("TOY_KEY", SENTINEL)
    (toys / "token").write_text(SENTINEL)
    text = "extends: base.yaml\nsandbox: {api_key: env:TOY_KEY}\ngateway: {token: 'file:token'}\nsteps: 3\n"
    (toys / "recipe.yaml").write_text(text)
    checked = check_recipe(toys / "recipe.yaml", site="here")
    assert checked.problems == []
    found = lock_text(checked.loaded, checked.plugins)
    assert "env:TOY_KEY" in found
    assert "file:token" in found
    assert SENTINEL not in found
    assert str(toys) not in found
    assert str(Path(__file__).parents[2]) not in found


def test_a_value_in_place_of_a_secret_is_refused_and_not_repeated(
    toys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lock", "base.yaml", f"sandbox.api_key={SENTINEL}"])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert SENTINEL not in said.out + said.err


def test_all_that_no_longer_matches_is_refused_at_once_by_name(toys: Path) -> None:
    (toys / "template").write_text("one")
    found = lock("base.yaml", model_of(toys / "model"), "model.chat_template=template")
    assert set(found["digests"]) == {"environment.tasks.train", "model.path", "model.chat_template"}
    assert check_recipe("recipe.lock.yaml", site="here").problems == []
    lock(
        "base.yaml", "model.path=model", "model.chat_template=template",
        versions={"python": "2.7.18", "absent-lib": "3.1"}, digests={"environment.tasks.train": "0" * 64},
    )  # fmt: skip
    (toys / "model" / "weights.bin").write_bytes(b"two")
    with pytest.raises(RecipeError) as refused:
        compose("recipe.lock.yaml")
    lines = str(refused.value).splitlines()
    names = ["python", "absent-lib", "environment.tasks.train", "model.path"]
    assert [line.split(": ")[:2] for line in lines] == [["recipe.lock.yaml", name] for name in names]
    assert lines[1] == (
        "recipe.lock.yaml: absent-lib: locked 3.1, here not installed: "
        "pip install absent-lib==3.1, or run with --allow-changed absent-lib"
    )
    assert "locked 000000000000, here " in lines[2]


def test_what_is_named_is_let_through_with_a_line(toys: Path) -> None:
    lock("base.yaml", versions={"python": "2.7.18", "absent-lib": "3.1"})
    with pytest.raises(RecipeError) as refused:
        compose("recipe.lock.yaml", allow_changed=["python"])
    assert [problem.key for problem in refused.value.problems] == ["absent-lib"]
    loaded, _ = compose("recipe.lock.yaml", allow_changed=["all"])
    assert loaded.remarks[-1] == "let through: absent-lib: locked 3.1, here not installed"
    assert len([each for each in loaded.remarks if each.startswith("let through")]) == 2


def test_a_problem_of_the_recipe_itself_is_not_let_through(toys: Path) -> None:
    found = lock("base.yaml")
    found["recipe"]["steps"] = 0
    Path("recipe.lock.yaml").write_text(yaml.safe_dump(found))
    with pytest.raises(RecipeError, match="steps: 0 should be greater than 0"):
        compose("recipe.lock.yaml", allow_changed=["all"])


def test_only_a_lock_can_be_let_differ(toys: Path) -> None:
    with pytest.raises(RecipeError, match="--allow-changed is for a lock"):
        compose("base.yaml", allow_changed=["torch"])


def test_a_missing_plugin_and_a_changed_version_are_said_together(
    toys: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock("base.yaml", versions={"absent-lib": "3.1"})
    text = Path("recipe.lock.yaml").read_text().replace("use: generator", "use: gone")
    Path("recipe.lock.yaml").write_text(text)
    with pytest.raises(RecipeError) as refused:
        compose("recipe.lock.yaml")
    assert [problem.key for problem in refused.value.problems] == ["engine.use", "absent-lib"]


def test_what_was_not_there_is_recorded_as_absent_and_not_compared(toys: Path) -> None:
    checked = check_recipe("base.yaml", site="none")
    document = yaml.safe_load(lock_text(checked.loaded, checked.plugins))
    assert document["digests"] == {"environment.tasks.train": None}
    Path("recipe.lock.yaml").write_text(yaml.safe_dump(document))
    loaded, _ = compose("recipe.lock.yaml")
    assert "not compared" in loaded.remarks[-1]
    assert "environment.tasks.train" in loaded.remarks[-1]


def test_check_reports_a_changed_lock_as_a_fact_of_this_machine(
    toys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock("base.yaml", versions={"absent-lib": "3.1"})
    with pytest.raises(SystemExit) as ended:
        main(["check", "recipe.lock.yaml", "--site", "here", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert (found["ok"], found["runs_here"]) == (True, False)
    assert [(each["key"], each["scope"]) for each in found["problems"]] == [("absent-lib", "site")]
    assert check_recipe("recipe.lock.yaml", site="none").problems == []


def test_run_refuses_a_changed_lock_with_exit_code_2(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock("base.yaml", versions={"absent-lib": "3.1"})
    with pytest.raises(SystemExit) as ended:
        main(["run", "recipe.lock.yaml", "--allow-changed", "python"])
    assert ended.value.code == 2
    assert "--allow-changed absent-lib" in capsys.readouterr().err


def test_the_verb_writes_a_lock_that_has_no_problem(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--output", "written.yaml", "--site", "here"], ["--site", "none"]):
        with pytest.raises(SystemExit) as ended:
            main(["lock", "base.yaml", "steps=4", *arguments])
        assert ended.value.code == 0
    said = capsys.readouterr()
    assert yaml.safe_load(said.out)["recipe"]["steps"] == 4
    assert said.err == "Not here, so not compared when the lock is run: environment.tasks.train\n"
    assert compose("written.yaml")[0].recipe.steps == 4


def test_a_recipe_that_needs_another_is_locked_before_that_has_run(toys: Path) -> None:
    text = 'extends: base.yaml\nneeds: {sft: first.yaml}\nmodel: {path: "${needs.sft.checkpoint}"}\n'
    (toys / "recipe.yaml").write_text(text)
    (toys / "first.yaml").write_text("extends: base.yaml\n")
    found = lock("recipe.yaml")
    assert found["unresolved"] == ["model.path"]
    assert list(found["digests"]) == ["environment.tasks.train", "needs.sft"]
    loaded, _ = compose("recipe.lock.yaml")
    assert loaded.recipe.needs["sft"].recipe == "first.yaml"
    results = {"sft": {"checkpoint": "some/where", "run_id": "x"}}
    after, plugins = compose("recipe.lock.yaml", needs_results=results)
    assert after.recipe.model is not None
    assert after.recipe.model.path == "some/where"
    of_the_run = yaml.safe_load(lock_text(after, plugins))
    assert of_the_run["recipe"]["needs"] == {}
    assert of_the_run["recipe"]["model"]["path"] == "some/where"
    (toys / "first.yaml").write_text("extends: base.yaml\nseed: 5\n")
    with pytest.raises(RecipeError, match=r"needs\.sft: locked .*: restore the recipe"):
        compose("recipe.lock.yaml")


def test_a_pack_is_known_by_its_generator_and_keys(toys: Path) -> None:
    overrides = ["trainer.algorithm=sft", "trainer.data=pack:sand/rows.jsonl"]
    overrides += [f"{part}=null" for part in ("environment", "agent", "sandbox", "engine")]
    assert list(lock("base.yaml", *overrides)["digests"]) == ["trainer.data"]


def test_fresh_weights_are_known_by_their_keys(toys: Path) -> None:
    init = ["model.init={architecture: llama, sizes: {a: 1}}", "~model.path", "model.tokenizer=model"]
    model_of(toys / "model")
    one = lock("base.yaml", *init)["digests"]
    assert list(one) == ["environment.tasks.train", "model.init", "model.tokenizer"]
    assert lock("base.yaml", *init, "model.init.std=0.5")["digests"]["model.init"] != one["model.init"]


def test_the_digest_of_tasks_is_that_of_their_ids_contents_and_order() -> None:
    one, two = Task("a", "1", "train"), Task("b", "2", "train")
    assert digest_tasks([one, two]) == digest_tasks([one, Task("b", "2", "train", limits={"agent": 5.0})])
    others = [[two, one], [one], [one, Task("b", "3", "train")], [one, Task("c", "2", "train")]]
    assert len({digest_tasks(each) for each in [[one, two], *others]}) == 5


def test_the_digest_of_a_directory_is_that_of_names_and_contents(tmp_path: Path) -> None:
    model_of(tmp_path / "model")
    one = digest_files(tmp_path / "model")
    (tmp_path / "model" / ".cache").write_text("not counted")
    assert digest_files(tmp_path / "model") == one
    (tmp_path / "model" / "weights.bin").rename(tmp_path / "model" / "other.bin")
    assert digest_files(tmp_path / "model") not in {one, None}
    assert digest_files(tmp_path / "absent") is None


def test_a_large_file_is_read_once_while_its_size_and_time_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_LARGE", 3)
    file = tmp_path / "weights.bin"
    file.write_bytes(b"one")
    os.utime(file, (1000, 1000))
    one = digest_files(file)
    file.write_bytes(b"two")
    os.utime(file, (1000, 1000))
    assert digest_files(file) == one, "taken from the cache"
    os.utime(file, (1001, 1001))
    assert digest_files(file) != one
    (tmp_path / "cache" / "rollhook" / "digests.json").write_text("{torn")
    assert digest_files(file) != one


def test_the_revision_of_an_editable_distribution_is_recorded_and_only_remarked(
    toys: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_part("git")
    checkout = toys / "checkout"
    checkout.mkdir()

    def git(*arguments: str) -> None:
        who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
        env = os.environ | who | {"GIT_COMMITTER_EMAIL": "a@b"}
        subprocess.run(["git", "-C", str(checkout), *arguments], check=True, env=env, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "one")
    origin = {"url": f"file://{checkout}", "dir_info": {"editable": True}}
    (site / "rollhook_toy-1.0.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    (clean,) = revisions(["rollhook-toy", "absent"])
    assert (clean["dirty"], clean["distributions"], len(clean["commit"])) == (False, ["rollhook-toy"], 40)
    text = yaml.safe_dump(lock("base.yaml"))
    assert clean["commit"] in text
    assert str(checkout) not in text
    (checkout / "new.py").write_text("")
    assert [each["dirty"] for each in revisions(["rollhook-toy"])] == [True]
    git("add", ".")
    git("commit", "-m", "two")
    loaded, _ = compose("recipe.lock.yaml")
    (remark,) = [each for each in loaded.remarks if "rollhook-toy" in each]
    assert remark.startswith(f"revision of rollhook-toy: locked {clean['commit'][:12]}, here ")
