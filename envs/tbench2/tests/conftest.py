"""Real sandboxes for this suite, where the package that makes them is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
from tb2_attempts import Attempts

from rollhook.testing.environment import OpenBox
from rollhook.testing.parts import needs_part
from rollhook.testing.podman import container_engine


@pytest.fixture
async def local_box(tmp_path: Path) -> AsyncIterator[OpenBox]:
    """Make sandboxes with the backend `local`, one backend for all of a test's."""
    needs_part("rollhook_local")
    from rollhook.testing.boxes import open_box, started

    async with started("local", tmp_path / "sandboxes") as backend:
        yield partial(open_box, backend)


@pytest.fixture(scope="session")
def containers() -> Iterator[dict[str, str]]:
    """Give the keys of a backend `docker` on an engine of the session's own."""
    needs_part("rollhook_docker")
    with container_engine() as engine:
        yield {"host": engine.host, "image": engine.image, "pull": "never"}


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.nightly)])
async def attempts(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Attempts]:
    """Run whole episodes in sandboxes of a backend: on this machine, at night in containers too."""
    backend: str = request.param
    needs_part(f"rollhook_{backend}")
    keys = request.getfixturevalue("containers") if backend == "docker" else {}
    from rollhook.testing.boxes import started

    async with started(backend, tmp_path / "sandboxes", **keys) as made:
        scratch = tmp_path / "attempt"
        scratch.mkdir()
        yield Attempts(made, scratch, keys.get("image", "debian:12"))
