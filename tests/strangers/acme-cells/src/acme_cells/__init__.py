"""Sandboxes of Acme: bubblewrap makes a cell, nsenter goes into it."""

from typing import Annotated

from pydantic import Field, PositiveInt

from rollhook import Component, Config, hookimpl


class CellsConfig(Config):
    """Keys of `sandbox: {use: cells}`."""

    disk_bytes: Annotated[PositiveInt, Field(description="files of a cell, held in memory")] = 256 << 20


@hookimpl
def rollhook_sandboxes() -> list[Component]:
    """Supply the backend."""
    return [Component("cells", CellsConfig, "acme_cells.cells:Cells", "bubblewrap cells of Acme")]
