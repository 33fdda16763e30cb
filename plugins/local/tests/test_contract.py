"""The contract of sandboxes, for every mode."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rollhook.component import BuildContext
from rollhook.testing.sandbox import SandboxContract
from rollhook.testing.sandbox_case import MakeBackend
from rollhook_local import LocalSandboxConfig
from rollhook_local.backend import LocalSandboxes
from rollhook_local.programs import which


def maker(mode: str, scratch: Path) -> MakeBackend:
    config = LocalSandboxConfig.model_validate({"mode": mode})
    context = BuildContext(logging.getLogger("test"), scratch, scratch)
    return lambda: LocalSandboxes(config, context)


@pytest.mark.skipif(which("bwrap") is None, reason="needs bubblewrap (apt-get install bubblewrap)")
class TestBubblewrap(SandboxContract):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> MakeBackend:
        return maker("bubblewrap", tmp_path)


@pytest.mark.skipif(which("unshare") is None, reason="util-linux is not installed")
class TestUnshare(SandboxContract):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> MakeBackend:
        return maker("unshare", tmp_path)


class TestProcess(SandboxContract):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> MakeBackend:
        return maker("process", tmp_path)
