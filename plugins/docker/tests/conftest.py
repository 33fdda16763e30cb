"""The engine that all tests here share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollhook.component import BuildContext
from rollhook.testing.podman import Engine, container_engine
from rollhook_docker import DockerSandboxConfig
from rollhook_docker.backend import DockerSandboxes

MakeDocker = Callable[..., DockerSandboxes]


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with container_engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def small_engine() -> Iterator[Engine]:
    """One that has room for 128 MiB, and that a test may stop."""
    with container_engine(storage_bytes=128 << 20) as engine:
        yield engine


@pytest.fixture
def make_docker(engine: Engine, tmp_path: Path) -> MakeDocker:
    def make(**keys: Any) -> DockerSandboxes:
        config = DockerSandboxConfig.model_validate({"host": engine.host, "image": engine.image, **keys})
        return DockerSandboxes(config, BuildContext(logging.getLogger("test"), tmp_path, tmp_path))

    return make
