"""Dockerfiles whose files travel in their text: what goes in, what never does, what a service must accept."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook.errors import SandboxError
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook_daytona.backend import split_base
from rollhook_daytona.dockerfile import CHUNK, embed, parse

LIMIT = 1 << 20


@pytest.fixture
def context(tmp_path: Path) -> Path:
    root = tmp_path / "context"
    (root / "app" / "sub").mkdir(parents=True)
    (root / "app" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (root / "app" / "run.sh").chmod(0o755)
    (root / "app" / "sub" / "data").write_bytes(bytes(range(256)))
    (root / "app" / "link").symlink_to("sub/data")
    (root / "one.txt").write_text("one")
    (root / "two.txt").write_text("two")
    (root / "solution").mkdir()
    (root / "solution" / "solve.sh").write_text("the answer")
    return root


def run_lines(text: str, cwd: Path) -> None:
    """Do what a builder does with the RUN lines, in a directory of this machine."""
    for instruction in parse(text):
        if instruction.word == "RUN":
            done = subprocess.run(
                ["/bin/sh", "-c", instruction.rest], cwd=cwd, capture_output=True, check=False
            )
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("COPY one.txt out/", {"out/one.txt": b"one"}),
        ("COPY one.txt out", {"out": b"one"}),
        ("COPY one.txt two.txt out/", {"out/one.txt": b"one", "out/two.txt": b"two"}),
        ("COPY *.txt ./", {"one.txt": b"one", "two.txt": b"two"}),
        ('COPY ["one.txt", "with space/"]', {"with space/one.txt": b"one"}),
        ("COPY app deep/er", {"deep/er/run.sh": None, "deep/er/sub/data": bytes(range(256))}),
        ("COPY --chmod=600 one.txt out/", {"out/one.txt": b"one"}),
        ("ADD one.txt .", {"one.txt": b"one"}),
        ("COPY one.txt \\\n  out/", {"out/one.txt": b"one"}),
    ],
)
def test_copied_files_arrive(
    context: Path, tmp_path: Path, line: str, expected: dict[str, bytes | None]
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    run_lines(embed(f"FROM debian\n{line}\n", context, LIMIT), target)
    for name, content in expected.items():
        assert content is None or (target / name).read_bytes() == content
    found = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    assert expected.keys() <= found
    assert not any("solution" in name for name in found)
    if line.startswith("COPY app"):
        assert (target / "deep/er/run.sh").stat().st_mode & 0o777 == 0o755
        assert (target / "deep/er/link").is_symlink()
    if "chmod" in line:
        assert (target / "out/one.txt").stat().st_mode & 0o777 == 0o600


def test_the_solution_is_no_part_of_a_context(context: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    run_lines(embed("FROM debian\nCOPY . all\n", context, LIMIT), target)
    assert (target / "all/one.txt").exists()
    assert not (target / "all/solution").exists()
    for line in ("COPY solution /x", "COPY ./solution/solve.sh /x", "COPY app/../solution /x"):
        with pytest.raises(SandboxError, match="never enters"):
            embed(f"FROM debian\n{line}\n", context, LIMIT)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("COPY absent /x", "absent is not in"),
        ("COPY $NAME /x", "variables"),
        ("COPY one.txt", "no source"),
        ("COPY --parents one.txt /x", "parents"),
        ('COPY ["one.txt", /x', "not understood"),
        ("ADD files.tar.gz /x", "archives"),
        ("COPY out/secret /x", "leads out"),
    ],
)
def test_what_cannot_be_copied_is_said(context: Path, tmp_path: Path, line: str, said: str) -> None:
    (context / "files.tar.gz").write_bytes(b"")
    (tmp_path / "secret").write_text("of the host")
    (context / "out").symlink_to(tmp_path)
    with pytest.raises(SandboxError, match=said) as raised:
        embed(f"FROM debian\n{line}\n", context, LIMIT)
    assert raised.value.kind == "user"


def test_without_a_context_nothing_is_copied() -> None:
    with pytest.raises(SandboxError, match="context"):
        embed("FROM debian\nCOPY a b\n", None, LIMIT)


def test_lines_are_short_and_the_whole_is_limited(context: Path) -> None:
    (context / "big").write_bytes(random.Random(1).randbytes(5 * CHUNK))
    text = embed("FROM debian\nCOPY big /big\n", context, LIMIT)
    lines = text.splitlines()
    assert max(len(line) for line in lines) < 65_535
    assert len(lines) == 1 + 6 + 1
    with pytest.raises(SandboxError, match="limit of 100000") as raised:
        embed("FROM debian\nCOPY big /big\n", context, 100_000)
    assert raised.value.kind == "user"


def test_the_same_files_give_the_same_text(context: Path) -> None:
    text = "FROM debian\nUSER app\nCOPY app /app\nRUN true\n"
    first = embed(text, context, LIMIT)
    for path in context.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (1, 1))
    assert embed(text, context, LIMIT) == first
    (context / "app" / "run.sh").write_text("other")
    assert embed(text, context, LIMIT) != first


def test_files_are_roots_whoever_the_image_runs_as(context: Path) -> None:
    lines = embed("FROM debian\nUSER app\nCOPY one.txt /x\nRUN id\n", context, LIMIT).splitlines()
    assert lines[1:3] == ["USER app", "USER root"]
    assert lines[-2:] == ["USER app", "RUN id"]


def test_what_is_not_from_the_context_is_left_alone() -> None:
    text = (
        "FROM debian AS build\nRUN <<EOF\nCOPY not an instruction\nEOF\nFROM debian\n"
        "COPY --from=build /a /b\nADD https://example.org/x /x\nCOPY <<EOF /file\ntext\nEOF\n"
    )
    assert embed(text, None, LIMIT) == text


def test_arguments_before_from_are_put_into_it() -> None:
    text = "# syntax=x\nARG V=12\nARG NAME\nFROM debian:${V}${NAME:--slim} AS base\nRUN a \\\n  b\nENV X=1\n"
    assert split_base(text) == ("debian:12-slim AS base", ["RUN a \\\n  b", "ENV X=1"])
    for bad in ("", "RUN true\n", "# only a comment\n"):
        with pytest.raises(SandboxError, match="FROM"):
            split_base(bad)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.sampled_from(["RUN a \\", "  b", "# c", "", "ENV A=1", "RUN <<X", "X", "COPY --from=a b c", "\\"]),
        max_size=12,
    )
)
def test_parsing_loses_no_instruction(lines: list[str]) -> None:
    text = "\n".join(["FROM debian", *lines]) + "\n"
    parsed = parse(text)
    assert parsed[0].word == "FROM"
    kept = "\n".join(instruction.text for instruction in parsed) + "\n"
    assert parse(kept) == parsed


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=3000), st.text("abc \u00fc'\"-", min_size=1, max_size=20))
def test_any_bytes_and_names_arrive(data: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        (Path(first) / "d").mkdir()
        (Path(first) / "d" / name).write_bytes(data)
        run_lines(embed("FROM debian\nCOPY d out/\n", Path(first), LIMIT), Path(second))
        assert (Path(second) / "out" / name).read_bytes() == data


async def test_an_image_with_files_is_built_by_the_service(make_daytona: Any, context: Path) -> None:
    backend = make_daytona()
    text = (
        "FROM debian:12\nWORKDIR /srv/app\nENV GREETING='hello you'\nCOPY --chown=daytona app .\n"
        "USER daytona\nCOPY one.txt two.txt /opt/texts/\nRUN ./run.sh > /tmp/said\n"
    )
    raw = await backend.create(SandboxSpec(dockerfile=text, context_dir=str(context), workdir="/srv/app"))
    try:
        sandbox = Sandbox(raw, capabilities=backend.capabilities)
        script = "cat /tmp/said; stat -c %U run.sh /opt/texts/one.txt; echo $GREETING; id -un; ls -A /tmp"
        result = await sandbox.shell(script, timeout=60)
        assert result.text.split("\n")[:5] == ["ran", "daytona", "root", "hello you", "root"]
        assert "rollhook-copy" not in result.text
        assert await sandbox.read("sub/data") == bytes(range(256))
    finally:
        await backend.delete(raw.id)
        await backend.aclose()
