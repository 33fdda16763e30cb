"""One real Ray cluster for all tests here: a head without CPUs and two workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollhook.testing.launcher import SENTINEL
from rollhook.testing.ray_cluster import RayCluster, ray_cluster

#: a secret that the nodes have in their environment, and nobody else
NODE_SECRET = "RAY_TESTS_NODE_SECRET"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Give the cluster that is shared by all tests that leave it as it is."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, NODE_SECRET: SENTINEL}
    with ray_cluster(tmp_path_factory.mktemp("cluster"), environment=environment) as cluster:
        yield cluster
