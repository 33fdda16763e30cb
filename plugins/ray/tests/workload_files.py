"""Job specs and base configs on disk, as several test modules write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

SPEC: dict[str, Any] = {
    "submission_id": "ppo-1",
    "workload": "ppo",
    "code_path": "/private/common/code/verl/codeA",
    "model": "/private/common/models/qwen",
    "dataset": "/private/datasets/gsm8k",
}


def written(directory: Path, name: str = "spec.yaml", **keys: Any) -> Path:
    data = {key: value for key, value in (SPEC | keys).items() if value is not None}
    path = directory / name
    path.write_text(
        json.dumps(data)
        if name.endswith(".json")
        else yaml.safe_dump(data, allow_unicode=True, sort_keys=False)
    )
    return path


def base_file(directory: Path, **keys: Any) -> Path:
    path = directory / "base.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path
