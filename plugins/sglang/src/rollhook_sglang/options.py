"""The options that a release of SGLang has, read from its source with `ast`: nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

#: where the options stand, below the package: one file, and in later releases a folder beside it
SERVER_ARGS = "srt/server_args.py"
FOLDER = "srt/arg_groups/fields/"
#: how an option takes values: not, one, or several
SWITCH, ONE, SEVERAL = "", "=", "=..."


def options(sources: Mapping[str, str | bytes]) -> dict[str, str]:
    """Return the options of the server and how each takes values, from source by path below the package."""
    found: dict[str, str] = {}
    for name, source in sources.items():
        if name != SERVER_ARGS and not name.startswith(FOLDER):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                found |= _added(node)
            elif isinstance(node, ast.AnnAssign):
                found |= _declared(node)
    return found


def options_of(package: Path) -> dict[str, str]:
    """Return the options of an installed SGLang, none where they stand elsewhere."""
    files = [package / SERVER_ARGS, *sorted((package / FOLDER).glob("*.py"))]
    return options({f.relative_to(package).as_posix(): f.read_bytes() for f in files if f.is_file()})


def _added(call: ast.Call) -> dict[str, str]:
    """Return the options of a call of `add_argument`."""
    given = {k.arg: k.value for k in call.keywords}
    action = ast.unparse(given["action"]) if "action" in given else ""
    if "StoreTrue" in action or action in ("'store_true'", "'store_false'") or "StoreConst" in action:
        takes = SWITCH
    else:
        takes = _several(given.get("nargs"))
    if "StoreConst" in action and "nargs" in given and ast.unparse(given["nargs"]) == "None":
        takes = ONE
    return {option: takes for option in _strings(call.args) if option.startswith("--")}


def _declared(node: ast.AnnAssign) -> dict[str, str]:
    """Return the options of a field `name: A[type, help or Arg(...)]`."""
    annotation = node.annotation
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) not in ("A", "Annotated"):
        return {}
    if not isinstance(node.target, ast.Name) or not isinstance(annotation.slice, ast.Tuple):
        return {}
    kind = ast.unparse(annotation.slice.elts[0]).removeprefix("Optional[").removesuffix("]")
    arg = _arg(node)
    given = {k.arg: k.value for k in arg.keywords} if arg is not None else {}
    if isinstance(more := given.get("action_kwargs"), ast.Dict):
        given |= {
            str(getattr(key, "value", "")): value for key, value in zip(more.keys, more.values, strict=True)
        }
    if "no_cli" in given and ast.literal_eval(given["no_cli"]):
        return {}
    name = (
        ast.literal_eval(given["cli_name"])
        if "cli_name" in given
        else "--" + node.target.id.replace("_", "-")
    )
    names = [name, *(ast.literal_eval(given["aliases"]) if "aliases" in given else [])]
    action = ast.unparse(given["action"]) if "action" in given else ""
    if "BooleanOptional" in action:
        names.append("--no-" + name.removeprefix("--"))
    if kind == "bool" or "BooleanOptional" in action or "StoreTrue" in action:
        return dict.fromkeys(names, SWITCH)
    several = kind.startswith(("List[", "list[")) and "type_parser" not in given
    return dict.fromkeys(names, SEVERAL if several else _several(given.get("nargs")))


def _arg(node: ast.AnnAssign) -> ast.Call | None:
    inside = getattr(getattr(node.annotation, "slice", None), "elts", [])
    calls = [e for e in inside if isinstance(e, ast.Call) and ast.unparse(e.func) == "Arg"]
    return calls[0] if calls else None


def _several(nargs: ast.expr | None) -> str:
    return SEVERAL if nargs is not None and ast.unparse(nargs) in ("'+'", "'*'") else ONE


def _strings(nodes: Sequence[ast.expr]) -> list[str]:
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
