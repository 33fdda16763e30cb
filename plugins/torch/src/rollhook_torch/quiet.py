"""Settings that must stand before torch is imported."""

from __future__ import annotations

import os

ENVIRONMENT = {
    # spinning threads of one process starve another's: a factor of six on two cores
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def prepare(threads: int | None = None) -> None:
    """Set them, without overriding what the user chose, and the number of threads."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    count = threads or os.cpu_count() or 1
    os.environ["OMP_NUM_THREADS"] = str(count)
    import torch

    torch.set_num_threads(count)


def quiet_transformers() -> None:
    """No progress bars while weights load and are written."""
    from transformers.utils import logging

    logging.disable_progress_bar()
