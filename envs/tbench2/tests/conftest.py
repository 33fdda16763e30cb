"""Real sandboxes for this suite, where the package that makes them is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollhook.testing.environment import OpenBox
from rollhook.testing.parts import needs_part


@pytest.fixture
def local_box(tmp_path: Path) -> OpenBox:
    """Make sandboxes with the backend `local`."""
    needs_part("rollhook_local")
    from rollhook.testing.boxes import open_box_with

    return open_box_with("local", tmp_path / "sandboxes")
