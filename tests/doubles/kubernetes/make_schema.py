"""Makes `ray_schema.json` from KubeRay's own CRDs: `python make_schema.py SOURCE FILE...`.

The files, ray.io_rayclusters.yaml and ray.io_rayjobs.yaml, are in KubeRay's repository, under
helm-chart/kuberay-operator/crds (Apache-2.0); SOURCE says of which revision. Kept is what the API server acts
on: types, bounds, defaults, list kinds and rules. Descriptions are left out, and a part that occurs more than
once is written once, under `defs`.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import yaml


def _bare(node: Any) -> Any:
    if isinstance(node, dict):
        return {k: _bare(v) for k, v in node.items() if not (k == "description" and isinstance(v, str))}
    return [_bare(each) for each in node] if isinstance(node, list) else node


def make(source: str, files: list[Path]) -> dict[str, Any]:
    """Return the schemas of the storage versions, by plural name."""
    roots: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    for path in files:
        crd = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        version = next(v for v in crd["spec"]["versions"] if v["storage"])
        roots[crd["spec"]["names"]["plural"]] = _bare(version["schema"]["openAPIV3Schema"])
        columns[crd["spec"]["names"]["plural"]] = [
            {"name": each["name"], "jsonPath": each["jsonPath"]}
            for each in version["additionalPrinterColumns"]
        ]
    seen: collections.Counter[str] = collections.Counter()

    def count(node: Any) -> None:
        if isinstance(node, dict):
            seen[json.dumps(node, sort_keys=True)] += len(node) > 1
            for each in node.values():
                count(each)

    count(roots)
    names: dict[str, str] = {}
    defs: dict[str, Any] = {}

    def shared(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        text = json.dumps(node, sort_keys=True)
        if seen[text] < 2 or len(text) < 100:
            return {k: shared(v) for k, v in node.items()}
        if text not in names:
            names[text] = name = f"d{len(names)}"
            defs[name] = {k: shared(v) for k, v in node.items()}
        return {"$ref": names[text]}

    return {
        "source": source,
        "licence": "Apache-2.0, Copyright the KubeRay authors",
        "columns": columns,
        "roots": {k: shared(v) for k, v in roots.items()},
        "defs": defs,
    }


def main() -> None:
    """Write the file beside this program, one definition on a line."""
    made = make(sys.argv[1], [Path(each) for each in sys.argv[2:]])
    text = json.dumps({k: v for k, v in made.items() if k != "defs"}, indent=1)
    lines = [f'  "{k}": {json.dumps(v, separators=(",", ":"))}' for k, v in made["defs"].items()]
    text = text[:-2] + ',\n "defs": {\n' + ",\n".join(lines) + "\n }\n}\n"
    json.loads(text)
    Path(__file__).with_name("ray_schema.json").write_text(text)


if __name__ == "__main__":
    main()
