"""The subset of a Dockerfile that can be followed without images; the rest is refused by name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rollhook_tbench2.dockerfile import parse_dockerfile, target_of


def test_the_trivial_subset_is_followed() -> None:
    dockerfile = parse_dockerfile(
        "# a comment\nFROM debian:12-slim\n\nWORKDIR /app\nWORKDIR data\n"
        "ENV A=1 B='two words'\nENV C three four\n"
        "COPY files/ /work/\nCOPY \\\n  one.txt two.txt \\\n  sub/\n"
    )
    assert dockerfile.refused is None
    assert dockerfile.workdir == "/app/data"
    assert dockerfile.env == {"A": "1", "B": "two words", "C": "three four"}
    assert dockerfile.copies == (
        ("files", "/work/"),
        ("one.txt", "/app/data/sub/"),
        ("two.txt", "/app/data/sub/"),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("RUN apt-get update", "environment/Dockerfile:2: RUN: RUN is not among FROM, WORKDIR, ENV and COPY"),
        ("run true", "environment/Dockerfile:2: RUN: RUN is not among"),
        ("ADD x /x", "environment/Dockerfile:2: ADD: ADD is not among"),
        ("USER me", "environment/Dockerfile:2: USER: USER is not among"),
        ("WORKDIR $HOME", "environment/Dockerfile:2: WORKDIR: WORKDIR is not among"),
        ("ENV A=$B", "environment/Dockerfile:2: ENV: ENV is not among"),
        ("COPY --chmod=755 a /a", "environment/Dockerfile:2: COPY: COPY with '--chmod=755'"),
        ("COPY *.txt /a/", "environment/Dockerfile:2: COPY: COPY with '*.txt'"),
        (
            "COPY ../secret /a",
            "environment/Dockerfile:2: COPY: COPY of '../secret', which leaves environment/",
        ),
        ("FROM other", "environment/Dockerfile:2: FROM: several build stages"),
        ("COPY", "environment/Dockerfile:2: COPY: COPY is not among"),
    ],
)
def test_everything_else_is_refused_with_its_line(line: str, message: str) -> None:
    refused = parse_dockerfile(f"FROM debian\n{line}\n").refused
    assert refused is not None
    assert str(refused).startswith(message)
    assert str(refused).endswith("it needs a sandbox that runs images")


def test_a_value_that_grows_without_end_is_refused() -> None:
    lines = "ARG A=x\n" + "ARG A=$A$A$A$A$A$A$A$A$A$A\n" * 20 + "USER me\n"
    found = parse_dockerfile(f"FROM debian\n{lines}")
    assert found.user == "me"
    assert "ARG" in str(found.refused)


def test_a_long_instruction_is_read_in_a_moment() -> None:
    begun = time.process_time()
    parse_dockerfile("FROM debian\nRUN " + "a\\\n" * 300_000)
    assert time.process_time() - begun < 5


def test_a_file_lands_where_docker_would_put_it() -> None:
    assert target_of(Path("environment/one.txt"), "/in/") == "/in/one.txt"
    assert target_of(Path("environment/one.txt"), "/in") == "/in"
