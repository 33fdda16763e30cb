"""A double of SGLang that is installed as far as an interpreter can see, and engines that start it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollhook.component import BuildContext
from rollhook_sglang.config import SGLangConfig
from rollhook_sglang.engine import SGLangEngine
from rollhook_sglang.releases import COMPARED

HERE = Path(__file__).parent
Build = Callable[..., SGLangEngine]


def install(directory: Path, release: str) -> Path:
    """Install the double of a release into a directory for PYTHONPATH."""
    package = directory / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(HERE / "launch_server.py", package)
    listed = shutil.copy(HERE / "options" / f"{release}.txt", package / "options.txt").read_text().split()
    added = "".join(f'parser.add_argument("{row.partition("=")[0]}")\n' for row in listed)
    (package / "srt" / "server_args.py").write_text(added)
    info = directory / f"sglang-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n")
    return directory


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the double of each release is installed."""
    return {each: str(install(tmp_path_factory.mktemp("site") / "site", each)) for each in COMPARED}


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the double takes for weights."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="session")
def build(sites: dict[str, str]) -> Build:
    """Build an engine that starts the double of a release, the newest by default."""

    def build(scratch: Path, release: str = COMPARED[-1], double: str = "", **keys: object) -> SGLangEngine:
        env = {"PYTHONPATH": sites[release], **({"DOUBLE": double} if double else {})}
        keys = {"gpus": 0, "start_timeout": 60, "env": env, **keys}
        context = BuildContext(logging.getLogger("rollhook.engine"), scratch=scratch, cache=scratch, seed=7)
        return SGLangEngine(SGLangConfig(**keys), context)

    return build
