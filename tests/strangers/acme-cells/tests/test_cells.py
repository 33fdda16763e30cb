"""What Rollhook asks of sandboxes, and what is special about cells."""

import asyncio

import pytest
from acme_cells import CellsConfig
from acme_cells.cells import Cells

from rollhook.errors import SandboxError
from rollhook.sandbox import SandboxSpec
from rollhook.testing.environment import build_context
from rollhook.testing.sandbox import SandboxContract


@pytest.fixture
def make_backend(tmp_path):
    return lambda: Cells(CellsConfig(), build_context(tmp_path))


class TestCells(SandboxContract):
    gaps = {
        "test_an_argument_too_long_for_the_kernel_is_a_result": "nsenter's own arguments hold the command"
    }

    @pytest.fixture
    def make_backend(self, make_backend):
        return make_backend


async def test_a_cell_ends_when_its_lifetime_is_over(make_backend):
    backend = make_backend()
    cell = await backend.create(SandboxSpec(lifetime_seconds=0.3))
    async with asyncio.timeout(10):
        while await cell.alive():
            await asyncio.sleep(0.05)
    await backend.delete(cell.id)


async def test_commands_have_no_capabilities(make_backend):
    backend = make_backend()
    cell = await backend.create(SandboxSpec())
    status = (await cell.read("/proc/self/status", limit=1 << 16)).decode()
    assert "CapEff:\t0000000000000000" in status
    await backend.delete(cell.id)


async def test_an_image_is_refused(make_backend):
    with pytest.raises(SandboxError, match="cannot run the container image"):
        await make_backend().create(SandboxSpec(image="debian:12"))
