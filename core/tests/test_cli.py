from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import rollhook
from rollhook.cli import doctor
from rollhook.cli.main import VERBS, main
from rollhook.cli.output import as_json
from rollhook.plugins import Plugins
from rollhook.recipe.check import check_recipe
from rollhook.testing.distributions import write_distribution

Run = Callable[..., tuple[int, str, str]]
HEAVY = ["torch", "ray", "transformers", "tokenizers", "numpy", "aiohttp", "pluggy", "omegaconf"]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(list(arguments))
        shown = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, shown.out, shown.err

    return run


def program(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollhook.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


def test_help_lists_every_verb_with_one_line(cli: Run) -> None:
    code, out, _ = cli("--help")
    assert code == 0
    for verb in VERBS:
        assert f"\n  {verb} " in out


def test_help_imports_no_verb(site: Path) -> None:
    source = (
        "import sys\nfrom rollhook.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print('LOADED', [m for m in sys.modules if m.startswith('rollhook.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED ['rollhook.cli.main']"


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"], ["--version"]])
def test_starting_imports_nothing_heavy(arguments: list[str]) -> None:
    source = (
        f"import sys\nfrom rollhook.cli.main import main\ntry:\n    main({arguments!r})\nexcept SystemExit:\n"
        f"    pass\nprint('LOADED', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_checking_imports_no_sdk(toys: Path) -> None:
    source = (
        "import sys\nfrom rollhook.recipe.check import check_recipe\ncheck_recipe('base.yaml', site='none')\n"
        "print('LOADED', [m for m in ['torch', 'ray', 'transformers', 'aiohttp'] if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, cwd=toys
    )
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_checking_for_another_machine_imports_only_what_is_asked_something(toys: Path) -> None:
    """An environment's classes cost as much as the rest of a check."""
    asked: list[str] = []
    loading = Plugins.load_class

    def load_class(plugins: Plugins, kind: str, name: str) -> type[Any]:
        asked.append(kind)
        return loading(plugins, kind, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plugins, "load_class", load_class)
        check_recipe("base.yaml", site="none")
        assert {"agent", "engine", "trainer", "launcher"} <= set(asked)
        assert not {"environment", "tracker", "pack"} & set(asked)
        check_recipe("base.yaml", site="here")
        assert "environment" in asked


TWO_COMMANDS = """
import typer

app = typer.Typer()

@app.command()
def one(count: int = 1) -> None:
    print(count)

@app.command()
def two() -> None:
    print(2)

app()
"""


def cpu_seconds(argv: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


@pytest.mark.parametrize(("ours", "theirs"), [("--help", "--help"), ("plugins", "one")])
def test_starting_costs_at_most_half_more_than_a_program_of_two_commands(
    tmp_path: Path, ours: str, theirs: str
) -> None:
    (tmp_path / "two.py").write_text(TWO_COMMANDS)
    here = [sys.executable, "-m", "rollhook.cli.main", ours]
    there = [sys.executable, str(tmp_path / "two.py"), theirs]
    cpu_seconds(here), cpu_seconds(there)
    pairs = [(cpu_seconds(here), cpu_seconds(there)) for _ in range(7)]
    assert min(each[0] for each in pairs) <= 1.5 * min(each[1] for each in pairs)


def test_the_version_is_printed(cli: Run) -> None:
    assert cli("--version") == (0, f"rollhook {rollhook.__version__}\n", "")


def test_an_unknown_verb_and_an_unknown_option_are_wrong_usage(cli: Run) -> None:
    code, _, err = cli("rnu")
    assert code == 2
    assert "No such command 'rnu'. Did you mean 'run'?" in err
    code, _, err = cli("plugins", "--chekc")
    assert code == 2
    assert "--chekc" in err


def test_no_arguments_show_the_help(cli: Run) -> None:
    code, out, err = cli()
    assert code in {0, 2}
    assert "Usage: rollhook" in out + err


def test_completion_knows_the_verbs() -> None:
    done = program(_ROLLHOOK_COMPLETE="complete_bash", COMP_WORDS="rollhook plu", COMP_CWORD="1")
    assert done.stdout.split() == ["plugins"]
    assert "rollhook" in program("--show-completion", SHELL="/bin/bash").stdout


def test_a_verb_whose_module_is_absent_is_listed_and_says_so(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERBS, "later", ("rollhook.cli.later:run", "Comes later."))
    assert "Comes later." in cli("--help")[1]
    code, _, err = cli("later")
    assert (code, err) == (
        2, "rollhook: the verb 'later' is not available: No module named 'rollhook.cli.later'\n"
    )  # fmt: skip


VERB = """
import typer

app = typer.Typer()

@app.command()
def hello(name: str) -> None:
    if name == "nobody":
        raise {error}
    typer.echo(f"hello {name}")
"""


def plugin_verb(site: Path, error: str = "ValueError('one\\ntwo')", name: str = "rollhook-greet") -> None:
    module = name.replace("-", "_")
    source = VERB.replace("{error}", error)
    write_distribution(site, name, entry_points={"command.greet": f"{module}:app"}, modules={module: source})


def test_a_plugin_adds_a_verb(site: Path, cli: Run) -> None:
    plugin_verb(site)
    assert "greet" in cli("--help")[1]
    assert "rollhook_greet" not in sys.modules
    assert cli("greet", "hello", "you") == (0, "hello you\n", "")


def test_a_verb_of_two_plugins_names_both(site: Path, cli: Run) -> None:
    plugin_verb(site)
    plugin_verb(site, name="rollhook-shout")
    code, _, err = cli("greet")
    assert code == 2
    assert "claimed by rollhook-greet and rollhook-shout" in err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        ("ValueError('one\\ntwo')", 1, "rollhook: ValueError: one two (--debug shows where)\n"),
        ("TimeoutError('no answer')", 124, "rollhook: TimeoutError: no answer (--debug shows where)\n"),
        ("KeyboardInterrupt", 3, "Stopped.\n"),
        ("__import__('rollhook.errors').errors.UsageError('not so')", 2, "rollhook: not so\n"),
        ("__import__('rollhook.errors').errors.EngineError('gone')", 1, "rollhook: gone\n"),
        (
            "ExceptionGroup('all', [ExceptionGroup('some', [OSError('full')])])",
            1,
            "rollhook: OSError: full (--debug shows where)\n",
        ),
    ],
)
def test_errors_are_one_sentence_with_an_exit_code(
    site: Path, cli: Run, error: str, code: int, text: str
) -> None:
    plugin_verb(site, error)
    assert cli("greet", "hello", "nobody") == (code, "", text)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_debug_shows_the_traceback(site: Path, place: int) -> None:
    plugin_verb(site)
    arguments = ["greet", "hello", "nobody"]
    arguments.insert(place, "--debug")
    with pytest.raises(ValueError, match="one\ntwo"):
        main(arguments)


def test_plugins_are_listed_from_metadata(site: Path, cli: Run) -> None:
    write_distribution(
        site, "rollhook-zoo", entry_points={"agent.ant": "zoo", "agnet.bee": "zoo"}, modules={}
    )
    write_distribution(site, "rollhook-ants", entry_points={"agent.ant": "ants"}, modules={})
    code, out, _ = cli("plugins")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert "agent.ant rollhook-ants 1.0 also claimed by rollhook-zoo" in lines
    assert "agnet.bee rollhook-zoo 1.0 unknown kind 'agnet', did you mean 'agent'?" in lines


def test_plugins_check_imports_each_and_fails_if_one_does(site: Path, cli: Run) -> None:
    write_distribution(site, "rollhook-zoo", entry_points={"agent.ant": "zoo"}, modules={"zoo": "1 / 0"})
    code, out, _ = cli("plugins", "--check", "--json")
    states = {f"{row['kind']}.{row['name']}": row["state"] for row in json.loads(out)}
    assert code == 1
    assert states["agent.ant"].startswith(
        "rollhook-zoo 1.0 cannot be imported: zoo fails with ZeroDivisionError"
    )


def test_plugins_check_is_content_with_sound_plugins(toys: Path, cli: Run) -> None:
    code, out, _ = cli("plugins", "--check")
    assert code == 1
    assert [line.split()[0] for line in out.splitlines() if not line.endswith(" ok")] == ["sandbox.absent"]


def test_show_gives_keys_types_defaults_and_descriptions(toys: Path, cli: Run) -> None:
    code, out, _ = cli("show", "trainer.learner")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert lines == [
        "trainer.learner: learner",
        "algorithm grpo | sft 'grpo' what is minimised",
        "lr float > 0 0.0001 learning rate",
        "data text - rows",
        "betas list (0.9, 0.95) decay rates",
    ]
    assert "wrapped" in cli("show", "wrapper")[1]
    assert "episodes in flight" in cli("show", "rollout")[1]
    assert "  create_rate.burst " in cli("show", "sandbox")[1]
    assert "  weight " in cli("show", "environment")[1]
    assert "health.interval" not in cli("show", "recipe")[1]
    assert (
        json.loads(cli("show", "stick", "--json")[1])["router.stick"]["properties"]["ttl"]["default"] == 60.0
    )


def test_show_of_an_unknown_name_gives_the_nearest(toys: Path, cli: Run) -> None:
    assert cli("show", "learnr")[::2] == (
        2, "rollhook: no component or section of a recipe is called 'learnr'; did you mean 'learner'?"
        "; `rollhook plugins` lists components, `rollhook show recipe` the keys of a recipe\n",
    )  # fmt: skip
    assert "did you mean 'budgets'?" in cli("show", "budget")[2]
    assert "sandboxes here: absent, bare, box, wrapper" in cli("show", "sandbox.bx")[2]


def test_check_ends_with_the_number_of_problems(toys: Path, cli: Run) -> None:
    assert cli("check", "base.yaml") == (0, "base.yaml: no problems (this machine was not looked at)\n", "")
    assert cli("check", "base.yaml", "--site", "here") == (0, "base.yaml: no problems\n", "")
    code, out, _ = cli("check", "base.yaml", "stpes=1", "trainer.lr=-1")
    assert code == 1
    assert out.splitlines()[-1] == "base.yaml: 2 problems"


def test_a_site_problem_does_not_decide_the_exit_code(toys: Path, cli: Run) -> None:
    code, out, _ = cli("check", "base.yaml", "gateway.token=env:TOY_ABSENT", "--site", "here")
    assert code == 0
    assert out.splitlines()[0] == "On this machine:"
    assert out.splitlines()[-1] == (
        "base.yaml: nothing wrong in itself, but 1 problem on this machine: `rollhook run` stops here"
    )


def test_check_speaks_json(toys: Path, cli: Run) -> None:
    code, out, _ = cli("check", "base.yaml", "sandbox=bix", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["ok"] is False
    assert found["problems"][0] == {
        "key": "sandbox.use",
        "message": "'bix' is not a sandbox that is installed",
        "source": "command line",
        "allowed": "sandboxes here: absent, bare, box, wrapper",
        "nearest": "box",
        "hint": "",
        "scope": "composition",
    }


def test_check_of_a_recipe_that_is_not_there_fails(toys: Path, cli: Run) -> None:
    code, out, _ = cli("check", "toy-grop")
    assert code == 1
    assert out.splitlines()[0] == "'toy-grop' is no recipe file, and no shipped recipe"
    assert "did you mean 'toy-grpo'?" in out


def test_site_is_here_or_none(toys: Path, cli: Run) -> None:
    assert cli("check", "base.yaml", "--site", "there")[0] == 2


def test_explain_shows_parts_values_and_deviations(toys: Path, cli: Run) -> None:
    code, out, _ = cli("explain", "toy-grpo", "steps=7")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert "trainer trainer.learner rollhook-toy 1.0" in lines
    assert "trainer.lr 0.0001 default of trainer.learner" in lines
    assert "steps 7 command line" in lines
    assert lines[-1] == "steps 7 instead of 100"
    assert json.loads(cli("explain", "toy-grpo", "steps=7", "--json")[1])["deviations"]["steps"]["value"] == 7


def test_explain_of_a_bad_recipe_shows_what_it_can(toys: Path, cli: Run) -> None:
    code, out, err = cli("explain", "base.yaml", "sandbox=bix")
    assert code == 2
    assert "trainer.learner" in out
    assert "'bix' is not a sandbox" in err


def test_needs_lists_what_a_recipe_and_those_it_needs_name(toys: Path, cli: Run) -> None:
    (toys / "recipe.yaml").write_text("extends: base.yaml\nneeds: {sft: toy-sft}\nsandbox: daytona\n")
    assert cli("needs", "recipe.yaml", "agent=nobody")[1].split() == [
        "environment.room", "agent.nobody", "sandbox.daytona", "router.stick", "router.spread",
        "engine.generator", "trainer.learner", "launcher.here", "pack.sand",
    ]  # fmt: skip


def test_needs_works_while_other_things_are_wrong_but_not_without_a_recipe(toys: Path, cli: Run) -> None:
    assert cli("needs", "base.yaml", "stpes=4")[0] == 0
    assert cli("needs", "bsae.yaml")[0] == 2


def test_needs_that_go_round_end(toys: Path, cli: Run) -> None:
    (toys / "recipe.yaml").write_text("extends: base.yaml\nneeds: {again: recipe.yaml}\n")
    assert cli("needs", "recipe.yaml")[0] == 0


def test_doctor_names_every_row_and_the_way_out(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = doctor.Row("thing", "fail", "is absent", "apt install thing")
    monkeypatch.setattr(doctor, "PROBES", [doctor.python, lambda: iter([broken])])
    code, out, _ = cli("doctor")
    assert code == 1
    assert out.splitlines()[0].startswith("ok    python  3.")
    assert out.splitlines()[1] == "fail  thing   is absent: apt install thing"


def test_doctor_of_this_machine_says_something_of_everything(cli: Run) -> None:
    code, out, _ = cli("doctor", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert {"python", "plugins", "cpu", "memory", "disk runs", "sandbox local", "ray", "torch"} <= set(rows)
    assert code == any(row["state"] == "fail" for row in rows.values())
    assert all(
        row["fix"] or row["name"].startswith("sandbox") for row in rows.values() if row["state"] != "ok"
    )


def test_doctor_warns_of_what_is_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "long/" * 20)
    monkeypatch.setattr(doctor, "_memory_free", lambda: 1024**3)
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0" if name == "ray" else None)
    assert [row.state for row in doctor.memory()] == ["warn"]
    assert [row.fix for row in doctor.ray()] == [
        "its socket paths get too long: set TMPDIR to a shorter directory"
    ]
    assert [row.state for row in doctor.torch()] == ["warn"]


@pytest.mark.parametrize(
    ("body", "state", "text"),
    [
        ("async def start(self): raise SandboxError('no bwrap: apt install bubblewrap')", "fail", "no bwrap"),
        ("async def create(self, spec): raise SandboxError('full')", "fail", "full"),
    ],
)
def test_doctor_tells_a_sandbox_that_does_not_work(
    toys: Path, site: Path, body: str, state: str, text: str
) -> None:
    source = (
        "from rollhook import Component, Config, hookimpl\nfrom rollhook.errors import SandboxError\n"
        "from rollhook_toy import Box, NoKeys\n"
        f"class Local(Box):\n    {body}\n"
        "@hookimpl\ndef rollhook_sandboxes():\n"
        "    return [Component('local', NoKeys, f'{__name__}:Local', 'x')]\n"
    )
    points = {"sandbox.local": "toylocal"}
    write_distribution(site, "rollhook-toylocal", entry_points=points, modules={"toylocal": source})
    (row,) = doctor.sandbox()
    assert (row.name, row.state) == ("sandbox local", state)
    assert text in row.text


def test_json_is_json_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    as_json({"b": float("nan"), "a": float("inf"), "text": "\ud800", "big": 2**70, "path": Path("x")})
    out = capsys.readouterr().out
    found = json.loads(out, parse_constant=pytest.fail)
    assert list(found) == ["b", "a", "text", "big", "path"]
    assert found["big"] == 2**70
    assert found["path"] == "x"
    as_json({"b": float("nan"), "a": {1: (2.5, "ü")}})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "b": None,
        "a": {"1": [2.5, "ü"]},
    }


def test_what_an_error_quotes_does_not_reach_the_terminal_as_it_is(cli: Run) -> None:
    assert "\x1b" not in cli("run", "\x1b[2J")[2]
