"""Real sandboxes for this suite, where the package that makes them is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from tb2_attempts import Attempts

from rollhook.testing.environment import OpenBox
from rollhook.testing.parts import needs_part


@pytest.fixture
async def local_box(tmp_path: Path) -> AsyncIterator[OpenBox]:
    """Make sandboxes with the backend `local`, one backend for all of a test's."""
    needs_part("rollhook_local")
    from rollhook.testing.boxes import open_box, started

    async with started("local", tmp_path / "sandboxes") as backend:
        yield partial(open_box, backend)


@pytest.fixture
async def attempts(tmp_path: Path) -> AsyncIterator[Attempts]:
    """Run whole episodes in sandboxes of the backend `local`."""
    needs_part("rollhook_local")
    from rollhook.testing.boxes import started

    async with started("local", tmp_path / "sandboxes") as backend:
        scratch = tmp_path / "attempt"
        scratch.mkdir()
        yield Attempts(backend, scratch)
