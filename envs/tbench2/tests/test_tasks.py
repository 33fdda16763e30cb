"""Reading a directory of tasks: one malformed task harms no other."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from rollhook.environment import EpisodeContext
from rollhook.errors import TaskError, UsageError
from rollhook.recipe.validate import validate
from rollhook.testing.environment import build_context
from rollhook_tbench2.config import SplitConfig, TBench2Config
from rollhook_tbench2.environment import SYSTEM_PROMPT, TBench2
from rollhook_tbench2.split import SplitPack
from rollhook_tbench2.tasks import ids_of, read_task, read_task_set

GOOD = {
    "task.toml": '[metadata]\nhost_ok = true\n[environment]\nnetwork_mode = "no-network"\n',
    "instruction.md": "Do it.\n",
    "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/sh\n",
}


def write_task(root: Path, name: str, **changes: str | None) -> Path:
    for path, text in {**GOOD, **changes}.items():
        if text is not None:
            file = root / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return root / name


def tbench2(root: Path, **keys: object) -> TBench2:
    return TBench2(TBench2Config.model_validate({"tasks_dir": str(root), **keys}), build_context())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"task.toml": None}, "task.toml: missing"),
        ({"instruction.md": None}, "instruction.md: missing"),
        ({"instruction.md": " \n"}, "instruction.md: empty"),
        ({"tests/test.sh": None}, "tests/test.sh: missing"),
        ({"tests/test.sh": ""}, "tests/test.sh: empty"),
        ({"instruction.md": "x" * (1 << 20) + "y"}, "instruction.md: larger than 1 MiB"),
        ({"task.toml": "#" * (1 << 20) + "#"}, "task.toml: larger than 1 MiB"),
        ({"task.toml": "a = " + "[" * 100_000}, "task.toml: not TOML: it is nested too deep"),
        (
            {"environment/docker-compose.yaml": "services: {}"},
            "environment/docker-compose.yaml: Docker Compose: not supported",
        ),
        (
            {"task.toml": "[environment]\ngpus = 2\n"},
            "task.toml:2: environment.gpus: GPUs (gpus = 2): not supported",
        ),
        (
            {"environment/Dockerfile": "FROM x\nCOPY files/ /work/\n"},
            "environment/Dockerfile: COPY: files is not in environment/",
        ),
        (
            {"task.toml": "oops", "tests/test.sh": None},
            "tests/test.sh: missing\n"
            "task.toml:1: not TOML: Expected '=' after a key in a key/value pair (at end of document)",
        ),
    ],
)
def test_a_malformed_task_says_why_and_harms_no_other(
    tmp_path: Path, changes: dict[str, str | None], problem: str
) -> None:
    write_task(tmp_path, "good")
    write_task(tmp_path, "bad", **changes)
    environment = tbench2(tmp_path)
    bad, good = environment.tasks()
    assert (good.id, good.problem) == ("good", None)
    assert bad.problem is not None
    assert bad.problem.replace(
        "task.toml:1: not", "task.toml:1: not"
    ) == problem or bad.problem == problem.replace("task.toml:1", "task.toml")
    with pytest.raises(TaskError, match="cannot run"):
        environment.episode(bad, EpisodeContext("e", 0, {}, build_context()))


def test_what_is_no_task_is_left_alone(tmp_path: Path) -> None:
    write_task(tmp_path, "good")
    write_task(tmp_path, ".hidden")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("tasks")
    assert [task.id for task in tbench2(tmp_path).tasks()] == ["good"]


def test_a_single_task_directory_is_a_set_of_one(tmp_path: Path) -> None:
    assert [task.id for task in tbench2(write_task(tmp_path, "only")).tasks()] == ["only"]


def test_a_directory_without_tasks_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tasks in"):
        tbench2(tmp_path).tasks()
    with pytest.raises(UsageError, match="is not a directory"):
        tbench2(tmp_path / "absent").tasks()


def test_exactly_one_source_of_tasks_is_given() -> None:
    _, problems = validate(TBench2Config, {}, "environment.0")
    assert [str(problem) for problem in problems] == [
        "environment.0: give exactly one of tasks_dir (a directory of tasks) and pack (e.g. pocket)"
    ]
    with pytest.raises(ValueError, match="exactly one of tasks_dir"):
        TBench2Config()
    with pytest.raises(ValueError, match="exactly one of tasks_dir"):
        TBench2Config.model_validate({"tasks_dir": "x", "pack": "pocket"})


@pytest.mark.parametrize(
    "change",
    [
        lambda task: (task / "instruction.md").write_text("Do it!\n"),
        lambda task: (task / "tests/test.sh").write_text("#!/bin/sh\n# other\n"),
        lambda task: (task / "tests/new.py").write_text(""),
        lambda task: (task / "solution/solve.sh").unlink(),
        lambda task: (task / "tests/test.sh").chmod(0o755),
        lambda task: (task / "tests/link").symlink_to("test.sh"),
        lambda task: os.mkfifo(task / "tests/fifo"),
        lambda task: (task / "instruction.md").rename(task / "tests/instruction.md"),
    ],
    ids=["instruction", "test", "new file", "solution", "mode", "link", "fifo", "moved"],
)
def test_the_digest_changes_with_the_content(tmp_path: Path, change: Callable[[Path], object]) -> None:
    task = write_task(tmp_path, "task")
    before = read_task(task).digest
    assert read_task(task).digest == before
    change(task)
    assert read_task(task).digest != before


def test_the_digest_does_not_depend_on_the_place_or_the_time(tmp_path: Path) -> None:
    task = write_task(tmp_path / "a", "task")
    copy = tmp_path / "b" / "task"
    shutil.copytree(task, copy)
    os.utime(copy / "instruction.md", (0, 0))
    assert read_task(copy).digest == read_task(task).digest


def test_splits_come_from_the_directory_and_from_the_recipe(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_task(tmp_path, name)
    (tmp_path / "splits.json").write_text('{"train": ["b", "a"], "heldout": ["c"]}')
    (tmp_path / "mine.txt").write_text("# two of them\nc\n\na\n")
    environment = tbench2(tmp_path, splits={"mine": str(tmp_path / "mine.txt"), "one": ["b"]})
    ids = {
        split: [task.id for task in environment.tasks(split)] for split in ("train", "heldout", "mine", "one")
    }
    assert ids == {"train": ["b", "a"], "heldout": ["c"], "mine": ["c", "a"], "one": ["b"]}
    assert len(environment.tasks("all")) == len(environment.tasks()) == 3
    with pytest.raises(UsageError, match=r"no split 'test' \(here: train, heldout, mine, one"):
        environment.tasks("test")


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ('{"train": ["a", "gone"]}', "split 'train' names 1 tasks that .* does not hold: gone"),
        ('{"train": "a"}', "train must be a list of task ids"),
        ("[]", "must hold a JSON object"),
        ("{", "is not JSON"),
        ('{"train": ["a", "a"]}', "split 'train' names a twice"),
    ],
)
def test_a_bad_splits_file_is_a_usage_error(tmp_path: Path, splits: str, message: str) -> None:
    write_task(tmp_path, "a")
    (tmp_path / "splits.json").write_text(splits)
    with pytest.raises(UsageError, match=message):
        read_task_set(tmp_path, {})


def test_a_split_file_that_is_absent_is_a_usage_error(tmp_path: Path) -> None:
    write_task(tmp_path, "a")
    with pytest.raises(UsageError, match=r"split file .* cannot be read: No such file"):
        tbench2(tmp_path, splits={"train": str(tmp_path / "none.txt")}).tasks()


def test_limits_are_those_that_the_task_asks_for(tmp_path: Path) -> None:
    text = "[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 30\n[environment]\nbuild_timeout_sec = 5\n"
    assert read_task(write_task(tmp_path, "a", **{"task.toml": text})).limits == {
        "agent": 60,
        "verify": 60,
        "create": 5,
    }
    assert read_task(write_task(tmp_path, "b", **{"task.toml": ""})).limits == {"verify": 630}


IMAGE = '[environment]\ndocker_image = "debian:12"\nnetwork_mode = "no-network"\n'
NO_IMAGE = "task t: it needs its container image, and its task.toml does not say `[metadata] host_ok = true`"
ISOLATED = frozenset({"isolation", "network_off"})


@pytest.mark.parametrize(
    ("changes", "capabilities", "problem"),
    [
        ({}, ISOLATED, None),
        ({"task.toml": IMAGE}, ISOLATED | {"image"}, None),
        (
            {"task.toml": IMAGE},
            ISOLATED,
            NO_IMAGE,
        ),
        ({"task.toml": "[metadata]\nhost_ok = true\n" + IMAGE}, ISOLATED, None),
        (
            {"task.toml": "[metadata]\nhost_ok = 'yes'\n" + IMAGE},
            ISOLATED,
            NO_IMAGE,
        ),
        ({"environment/Dockerfile": "FROM x\nCOPY a /work/\n", "environment/a": ""}, ISOLATED, None),
        (
            {"environment/Dockerfile": "FROM x\nRUN make\n"},
            ISOLATED,
            "task t: environment/Dockerfile:2: RUN: RUN is not among FROM, WORKDIR, ENV and COPY: it needs a "
            "sandbox that runs images",
        ),
        ({"environment/Dockerfile": "FROM x\nRUN make\n"}, ISOLATED | {"image_build"}, None),
        (
            {"task.toml": ""},
            ISOLATED,
            "task t: network_mode 'public' needs a sandbox with the capability network_on",
        ),
        (
            {},
            frozenset(),
            "task t: network_mode 'no-network' needs a sandbox with the capability network_off",
        ),
        (
            {"task.toml": GOOD["task.toml"] + "[verifier]\nuser = 'judge'\n"},
            ISOLATED,
            "task t: verifier.user needs a sandbox with the capability user",
        ),
    ],
)
def test_what_a_sandbox_cannot_run_is_refused_by_name(
    tmp_path: Path, changes: dict[str, str], capabilities: frozenset[str], problem: str | None
) -> None:
    write_task(tmp_path, "t", **changes)
    assert tbench2(tmp_path).problems(capabilities) == ([problem] if problem else [])


def test_many_refused_tasks_are_counted(tmp_path: Path) -> None:
    for number in range(5):
        write_task(tmp_path, f"t{number}", **{"task.toml": IMAGE})
    (problem,) = tbench2(tmp_path).problems(ISOLATED)
    assert problem.startswith("tasks t0, t1, t2 and 2 more: it needs its container image")


def test_of_chosen_tasks_only_these_are_refused(tmp_path: Path) -> None:
    write_task(tmp_path, "plain")
    write_task(tmp_path, "pictured", **{"task.toml": IMAGE})
    environment = tbench2(tmp_path)
    pictured, plain = sorted(environment.tasks(), key=lambda task: task.id)
    assert environment.problems(ISOLATED, [plain]) == []
    (problem,) = environment.problems(ISOLATED, [plain, pictured])
    assert problem.startswith("task pictured: it needs its container image")


def test_the_prompt_is_the_recipes_else_the_packs_else_the_contract(tmp_path: Path) -> None:
    write_task(tmp_path, "t")

    def prompt(**keys: object) -> str | None:
        environment = tbench2(tmp_path, **keys)
        ctx = EpisodeContext("e", 0, {}, build_context())
        return environment.episode(environment.tasks()[0], ctx).prompt  # type: ignore[attr-defined, no-any-return]

    assert prompt() == SYSTEM_PROMPT
    (tmp_path / "pack.json").write_text('{"system_prompt": "Be brief."}')
    assert prompt() == "Be brief."
    assert prompt(system_prompt="Mine.") == "Mine."


def test_a_directory_that_cannot_be_read_has_its_problem_and_harms_no_other(tmp_path: Path) -> None:
    write_task(tmp_path, "good")
    deep = os.open(write_task(tmp_path, "deep"), os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=deep)
        below = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    tasks = read_task_set(tmp_path, {}).tasks
    subprocess.run(["rm", "-rf", tmp_path / "deep"], check=True)  # too deep for shutil as well
    assert tasks["good"].problem is None
    assert tasks["deep"].problem == "the directory cannot be read: is nested too deep"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = write_task(tmp_path, "t")

    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(task / "tests/test.sh"))

    monkeypatch.setattr(hashlib, "file_digest", refuse)
    assert read_task(task).problem == "tests/test.sh: cannot be read: Permission denied"


def test_a_link_to_itself_harms_no_task(tmp_path: Path) -> None:
    write_task(tmp_path, "a")
    for name in ("loop", "splits.json", "pack.json"):
        (tmp_path / name).symlink_to(name)
    assert [task.problem for task in read_task_set(tmp_path, {}).tasks.values()] == [None]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a" * 5000, "cannot be read: File name too long"),
        ("~nobody-of-this-name/tasks", "names a home directory that is not there"),
    ],
)
def test_a_tasks_directory_that_cannot_be_is_a_usage_error(name: str, message: str) -> None:
    pack = SplitPack(SplitConfig(tasks_dir=name), build_context())
    for read in (tbench2(Path("x"), tasks_dir=name).tasks, pack.digest):
        with pytest.raises(UsageError, match=message):
            read()


def test_a_split_file_of_an_impossible_name_is_a_usage_error() -> None:
    with pytest.raises(
        UsageError, match=r"split file .*a.*b.* cannot be read: it is not UTF-8 text, or its name is none"
    ):
        ids_of("a\0b")


@pytest.mark.parametrize("name", ["instruction.md", "task.toml"])
def test_text_that_is_no_text_is_a_problem(tmp_path: Path, name: str) -> None:
    task = write_task(tmp_path, "t")
    (task / name).write_bytes(b"# caf\xe9\n")
    assert read_task(task).problem == f"{name}: no UTF-8 text (byte 5)"


def test_a_file_that_is_none_is_not_called_missing(tmp_path: Path) -> None:
    task = write_task(tmp_path, "t", **{"instruction.md": None})
    (task / "instruction.md").symlink_to("task.toml")
    assert read_task(task).problem == "instruction.md: no regular file, or below a link"
    (task / "instruction.md").unlink()
    os.mkfifo(task / "instruction.md")
    assert read_task(task).problem == "instruction.md: no regular file, or below a link"


STEPS = '[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n'


@pytest.mark.parametrize(
    ("link", "target", "problem"),
    [
        ("solution", "/etc", "solution: leads out of the task"),
        ("steps/a/tests", "/etc", "steps/a/tests: leads out of the task"),
        ("steps/a/workdir", "../../../elsewhere", "steps/a/workdir: leads out of the task"),
        ("environment/file", "/etc/passwd", "environment/Dockerfile: COPY: file leads out of environment/"),
        ("environment/file", "../tests", "environment/Dockerfile: COPY: file leads out of environment/"),
        ("steps/a/tests", "../b/tests", None),
        ("environment/file", "other", None),
    ],
)
def test_a_link_does_not_give_a_sandbox_files_of_the_host(
    tmp_path: Path, link: str, target: str, problem: str | None
) -> None:
    files = {"steps/a/instruction.md": "One.", "steps/b/instruction.md": "Two.", "environment/other": "x"}
    files |= {"steps/b/tests/x": "x"}
    if link.startswith("environment"):
        files["environment/Dockerfile"] = "FROM debian\nCOPY file /work/\n"
    if link == "solution":
        files = {}
    files["task.toml"] = GOOD["task.toml"] + (STEPS if link.startswith("steps") else "")
    task = write_task(tmp_path, "t", **files)
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(task / link, ignore_errors=True)
    (task / link).parent.mkdir(parents=True, exist_ok=True)
    (task / link).symlink_to(target)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/t").symlink_to(task)
    assert read_task(task).problem == read_task(tmp_path / "pack/t").problem == problem


def test_a_link_to_a_name_that_is_no_text_counts_with_its_bytes(tmp_path: Path) -> None:
    first, second = write_task(tmp_path, "first"), write_task(tmp_path, "second")
    (first / "link").symlink_to(os.fsdecode(b"\xff"))
    (second / "link").symlink_to(os.fsdecode(b"\xfe"))
    tasks = read_task_set(tmp_path, {}).tasks
    assert tasks["first"].problem is None
    assert tasks["first"].digest != tasks["second"].digest


def test_a_huge_file_beside_the_dockerfile_is_not_held_in_memory(tmp_path: Path) -> None:
    task = write_task(tmp_path, "t", **{"environment/Dockerfile": "FROM x\n"})
    with (task / "environment" / "disk.img").open("wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    assert read_task(task).problem is None
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 16 << 20


@pytest.mark.parametrize("name", [b"new\nline", b"\xff", b"\x1b[2J"])
def test_a_name_that_cannot_be_printed_is_a_problem_and_shown_escaped(tmp_path: Path, name: bytes) -> None:
    write_task(tmp_path, os.fsdecode(name))
    (task,) = read_task_set(tmp_path, {}).tasks.values()
    assert task.id.isprintable()
    assert task.id.encode()
    assert task.problem == "the directory's name is no printable text; rename it"
