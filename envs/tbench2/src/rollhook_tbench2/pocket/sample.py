"""The sample of the pocket pack that people read: the first tasks of each family of the full pack.

python -m rollhook_tbench2.pocket.sample recipes/packs/pocket
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

from rollhook.component import BuildContext
from rollhook_tbench2.config import PocketConfig
from rollhook_tbench2.pocket.pack import PocketPack

CONFIG = PocketConfig(train_per_family=2, heldout_per_family=2)


def write_sample(directory: Path) -> None:
    """Replace a directory by the sample."""
    context = BuildContext(logging.getLogger(__name__), scratch=directory, cache=directory)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    PocketPack(CONFIG, context).write(directory)


if __name__ == "__main__":
    write_sample(Path(sys.argv[1]))
