"""The options, fields and paths that are used here, compared with the wheels of SGLang's releases.

With `UPDATE_SGLANG_OPTIONS=1` the lists in `options/` are written from the wheels.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollhook.engine.base import GenerationRequest, SamplingParams
from rollhook.engine.generation import generate_body
from rollhook.engine.server_info import dp_rank_field
from rollhook_sglang import releases
from rollhook_sglang.command import Start, command
from rollhook_sglang.config import SPECULATIVE, SWITCHES, VALUES, SGLangConfig
from rollhook_sglang.options import options

HERE = Path(__file__).parent
PACKAGE = "sglang/"
#: values that the profiles name, by option
NAMED = {"--moe-a2a-backend": {"deepep"}, "--kv-cache-dtype": {"fp8_e4m3"}, "--attention-backend": {"nsa"}}
#: paths of which the client needs one
PATHS = [
    *[{"/generate"}, {"/health"}, {"/health_generate"}, {"/server_info"}, {"/model_info"}, {"/flush_cache"}],
    *[{"/v1/loads", "/get_load"}, {"/pause_generation"}, {"/continue_generation"}, {"/abort_request"}],
    *[{"/update_weights_from_disk"}, {"/update_weight_version"}],
]

Sources = dict[str, bytes]


def download(requirement: str, directory: Path) -> Sources:
    """Return what is needed of a release's wheel; skip where pip cannot have it."""
    argv = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary", ":all:"]
    argv += ["--python-version", "3.11", "--implementation", "cp", "--platform", "any"]
    argv += ["--platform", "manylinux_2_34_x86_64", "--disable-pip-version-check", "-q", "-d", str(directory)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"needs pypi: {(done.stderr.strip().splitlines() or ['pip gave no reason'])[-1]}")
    (wheel,) = directory.glob("sglang-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name for name in archive.namelist() if name.startswith(f"{PACKAGE}srt/") and name[-3:] == ".py"
        ]
        return {name.removeprefix(PACKAGE): archive.read(name) for name in names}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sources]:
    """The sources of a release, downloaded once."""
    kept: dict[str, Sources] = {}

    def of(release: str) -> Sources:
        if release not in kept:
            kept[release] = download(f"sglang=={release}", tmp_path_factory.mktemp("wheel"))
        return kept[release]

    return of


def listed(release: str) -> dict[str, str]:
    """Read the options of a release as they are kept here."""
    rows = [line.partition("=") for line in (HERE / "options" / f"{release}.txt").read_text().split()]
    return {option: equals + rest for option, equals, rest in rows}


def every_key(release: str) -> list[str]:
    """Return the command line with every key given."""
    keys: dict[str, object] = dict.fromkeys(VALUES, "x")
    for name, field in SGLangConfig.model_fields.items():
        if name in keys and "str" not in str(field.annotation):
            keys[name] = 0.5 if name == "mem_fraction_static" else 4
    keys |= {"dp_size": 2, "dp_attention": True, "nnodes": 2, "host": "node", **dict.fromkeys(SWITCHES, True)}
    numbers = ("num_steps", "eagle_topk", "num_draft_tokens")
    keys["speculative"] = {key: 2 if key in numbers else "x" for key in SPECULATIVE}
    start = Start(Path("model"), 1, "{host}", 1, 1, first="{host}:2")
    return command(SGLangConfig(**keys), release, start)[3:]


@pytest.mark.parametrize("release", releases.COMPARED)
def test_every_key_is_an_option_of_the_release_and_takes_its_value_so(release: str) -> None:
    known = listed(release)
    arguments = every_key(release)
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        if argument.startswith("--"):
            assert argument in known, f"{release} has no {argument}"
            assert known[argument] in ("" if following.startswith("--") else "=", "=..."), argument
    assert (
        len({a for a in arguments if a.startswith("--")})
        >= len(VALUES) + len(SPECULATIVE) + len(SWITCHES) + 9
    )


@pytest.mark.parametrize("release", releases.COMPARED)
def test_the_options_kept_here_are_those_of_the_wheel(
    release: str, sources: Callable[[str], Sources]
) -> None:
    found = options(sources(release))
    assert len(found) > 300
    if os.environ.get("UPDATE_SGLANG_OPTIONS"):
        text = "".join(f"{option}{takes}\n" for option, takes in sorted(found.items()))
        (HERE / "options" / f"{release}.txt").write_text(text)
    assert found == listed(release)


@pytest.mark.parametrize("release", releases.COMPARED)
def test_the_wheel_takes_the_fields_the_paths_and_the_values(
    release: str, sources: Callable[[str], Sources]
) -> None:
    source = sources(release)
    request = GenerationRequest("r", [1], SamplingParams(seed=1), cache_key="weight-version:1")
    body = generate_body(request, stream=True)
    asked = {*body, dp_rank_field(release), "extra_key"}
    assert asked <= fields(source, "srt/managers/io_struct.py", "GenerateReqInput")
    assert set(body["sampling_params"]) <= fields(source, "srt/sampling/sampling_params.py", "SamplingParams")
    bodies = {
        "UpdateWeightFromDiskReqInput": {"model_path", "weight_version", "flush_cache"},
        "UpdateWeightVersionReqInput": {"new_version", "abort_all_requests"},
        "PauseGenerationReqInput": {"mode"},
        "AbortReq": {"rid", "abort_all"},
    }
    for name, sent in bodies.items():
        assert sent <= fields(source, "srt/managers/io_struct.py", name), name
    paths = {string for name, text in source.items() if "/entrypoints/" in name for string in strings(text)}
    assert [each for each in PATHS if not each & paths] == []
    for option, values in NAMED.items():
        assert values <= choices(source, option), option


@pytest.mark.parametrize(
    ("release", "field"), [("0.5.7", "data_parallel_rank"), ("0.5.10", "routed_dp_rank")]
)
def test_the_field_of_the_rank_is_renamed_where_it_is_said_to_be(
    release: str, field: str, sources: Callable[[str], Sources]
) -> None:
    known = fields(sources(release), "srt/managers/io_struct.py", "GenerateReqInput")
    assert dp_rank_field(release) == field
    assert field in known
    assert ("routed_dp_rank" in known) == (field == "routed_dp_rank")


@pytest.mark.nightly
def test_the_newest_release_has_every_option(tmp_path: Path) -> None:
    source = download("sglang<0.6", tmp_path)
    (wheel,) = tmp_path.glob("sglang-*.whl")
    release = wheel.name.split("-")[1]
    missing = [a for a in every_key(release) if a.startswith("--") and a not in options(source)]
    assert missing == [], f"SGLang {release}"


# -- reading the sources


def fields(source: Sources, path: str, name: str) -> set[str]:
    """Return the fields of a class or what its constructor takes, and of its bases in the same file."""
    classes = {n.name: n for n in ast.parse(source[path]).body if isinstance(n, ast.ClassDef)}
    found: set[str] = set()
    waiting = [name]
    while waiting:
        node = classes.get(waiting.pop())
        for each in node.body if node is not None else ():
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                found.add(each.target.id)
            elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
                found |= {a.arg for a in [*each.args.args, *each.args.kwonlyargs]}
        waiting += [base.id for base in node.bases if isinstance(base, ast.Name)] if node is not None else []
    return found


def choices(source: Sources, option: str) -> set[str]:
    """Return the values that an option takes, where they stand as a literal list."""
    key = option.removeprefix("--").replace("-", "_")
    names = [n for n in source if n == "srt/server_args.py" or n.startswith("srt/arg_groups/")]
    nodes = [node for name in names for node in ast.walk(ast.parse(source[name]))]
    lists = {
        t.id: n.value
        for n in nodes
        if isinstance(n, ast.Assign)
        for t in n.targets
        if isinstance(t, ast.Name)
    }
    for node in nodes:
        for call in calls(node, option, key):
            value = {k.arg: k.value for k in call.keywords}.get("choices")
            value = lists.get(value.id) if isinstance(value, ast.Name) else value
            if isinstance(value, ast.List):
                return {e.value for e in value.elts if isinstance(e, ast.Constant)}
    return set()


def calls(node: ast.AST, option: str, key: str) -> Iterator[ast.Call]:
    """Yield the calls that declare an option: of `add_argument`, or of `Arg` in a field's annotation."""
    if isinstance(node, ast.Call) and option in [getattr(a, "value", None) for a in node.args]:
        yield node
    if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == key:
        yield from (e for e in ast.walk(node.annotation) if isinstance(e, ast.Call))


def strings(source: bytes) -> set[str]:
    """Return the strings of a module that are paths."""
    nodes = ast.walk(ast.parse(source))
    return {
        n.value
        for n in nodes
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value[:1] == "/"
    }
