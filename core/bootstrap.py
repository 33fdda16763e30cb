"""Installs what a command needs and hands over to it. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TextIO

from workspace import (
    EXIT_STOPPED,
    EXIT_USAGE,
    BootstrapError,
    Progress,
    Runner,
    Wanted,
    Workspace,
    package_command,
    run_program,
)

HELP = """\
Rollhook from a checkout: Linux, Python 3.11 or newer, no GPU, no key, no Docker.

  python3 core run RECIPE [key=value ...]   install what the recipe names, then run it
  python3 core test [pytest arguments]      install everything, then run the tests
  python3 core VERB ...                     any other verb of the command line, e.g. check, explain, plugins

Start here, about five minutes after installation:

  python3 core run recipes/quickstart.yaml

The first call makes .venv in the checkout and installs with pip into it; the next starts at once.
`python3 core --help` lists all verbs; after the first call .venv/bin/rollhook is the same program.

  ROLLHOOK_TORCH_INDEX   package index for torch alone, e.g. https://download.pytorch.org/whl/cpu
  rm -r .venv            forget the installation; the next call makes it again

What to read: README.md, then docs/tutorial.md.
"""
#: what a verb without a recipe uses unless it is told otherwise
IMPLIED = {"tasks": ["environment.tbench2", "agent.oracle", "agent.nop", "sandbox.local"]}


def find_recipe(verb: str, arguments: Sequence[str], root: Path, cwd: Path) -> str | None:
    """Return the argument that names a recipe; raises BootstrapError when that file does not exist."""
    words = [a for a in arguments if not a.startswith(("-", "~", "+")) and "=" not in a]
    for word in words:
        if (root / "recipes" / f"{word}.yaml").is_file():
            return word
        if (cwd / f"{word}.yaml").is_file():
            return word
        if word.endswith((".yaml", ".yml")):
            if (cwd / word).is_file():
                return word
            raise BootstrapError(no_such_recipe(word, root, cwd), EXIT_USAGE)
    if verb == "run" and arguments and arguments[0] in words:
        raise BootstrapError(no_such_recipe(arguments[0], root, cwd), EXIT_USAGE)
    return None


def no_such_recipe(word: str, root: Path, cwd: Path) -> str:
    """Say that a recipe is not there, and which are."""
    here = [*(root / "recipes").glob("*.y*ml"), *(cwd / word).parent.glob("*.y*ml")]
    known = {file.stem: os.path.relpath(file, cwd) for file in sorted(set(here))}
    near = get_close_matches(Path(word).stem, known, n=2, cutoff=0.5)
    text = f"no recipe {word!r} (looked in {cwd} and for its bare name in {root / 'recipes'})."
    if near:
        return f"{text} Did you mean {' or '.join(known[n] for n in near)}?"
    return f"{text} Recipes here: {', '.join(known.values()) or 'none'}."


def recipe_needs(workspace: Workspace, recipe: str, arguments: Sequence[str], cwd: Path) -> list[str]:
    """Ask the core which components a recipe names; the answer is kept while no recipe changes."""
    overrides = [a for a in arguments if a.startswith(("~", "+")) or ("=" in a and not a.startswith("-"))]
    file = cwd / recipe
    read = [*sorted((workspace.root / "recipes").glob("*.yaml"))]
    if file.is_file():
        read += [file, *sorted(file.parent.glob("*.y*ml"))]
    digest = hashlib.sha256(json.dumps([str(file), *overrides, workspace.core.digest]).encode())
    for path in read:
        digest.update(path.read_bytes())
    key = digest.hexdigest()
    cache = workspace.venv / "rollhook-needs.json"
    try:
        known: dict[str, list[str]] = json.loads(cache.read_text())
    except (OSError, ValueError):
        known = {}
    if key not in known:
        argv = [str(workspace.python), str(workspace.venv / "bin/rollhook"), "needs", recipe, *overrides]
        lines: list[str] = []
        code = workspace.runner(argv, cwd, workspace.env, lines.append)
        if code != 0:
            raise BootstrapError("\n".join(lines) or f"`rollhook needs {recipe}` failed ({code})", code)
        known = dict(list(known.items())[-31:]) | {key: [line.strip() for line in lines if line.strip()]}
        temporary = cache.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(known))
        temporary.replace(cache)
    return known[key]


def advise_on_sandbox(names: Sequence[str], progress: Progress) -> None:
    """Say how to get bubblewrap where a recipe would use it and it is absent."""
    if "sandbox.local" not in names or shutil.which("bwrap"):
        return
    command = package_command("bubblewrap")
    if shutil.which("unshare"):
        progress.say(f"bubblewrap is not installed, so sandboxes use `unshare`. To get it: {command}")
    else:
        package = package_command("util-linux")
        progress.say(f"local sandboxes need bubblewrap ({command}) or, as a fallback, unshare ({package})")


def command_line(workspace: Workspace, verb: str, arguments: Sequence[str], cwd: Path) -> list[str]:
    """Install what a verb of the command line needs and return its argv."""
    recipe = find_recipe(verb, arguments, workspace.root, cwd)
    core = Wanted(workspace.core)
    workspace.ensure([core])
    names = [*arguments, *IMPLIED.get(verb, ())]
    if recipe is not None and verb != "needs":
        names = recipe_needs(workspace, recipe, arguments, cwd)
        advise_on_sandbox(names, workspace.progress)
    parts = [
        Wanted(d)
        for d in workspace.distributions[1:]
        if any(name in (c, c.partition(".")[2]) for c in d.components for name in names)
    ]
    workspace.ensure([core, *parts])
    return [str(workspace.python), str(workspace.venv / "bin/rollhook"), verb, *arguments]


def test_line(workspace: Workspace, arguments: Sequence[str], cwd: Path) -> list[str]:
    """Install everything and return the argv of pytest, for which the root is the working directory."""
    others = [Wanted(d, code_only=d.heavy) for d in workspace.distributions[1:]]
    workspace.ensure([Wanted(workspace.core, extra="test"), *others])
    absolute = []
    for argument in arguments:
        path, separator, rest = argument.partition("::")
        exists = not argument.startswith("-") and (cwd / path).exists()
        absolute.append(f"{cwd / path}{separator}{rest}" if exists else argument)
    return [str(workspace.python), "-P", "-m", "pytest", *absolute]


def main(
    argv: Sequence[str],
    *,
    root: Path | None = None,
    env: Mapping[str, str] | None = None,
    runner: Runner = run_program,
    stream: TextIO | None = None,
    execute: Callable[[str, list[str]], object] = os.execv,
) -> int:
    """Do what the command line asks; returns only on failure or for help."""
    progress = Progress(stream or sys.stderr)
    if not argv or argv[0] == "help":
        sys.stdout.write(HELP)
        return 0
    try:
        cwd = Path.cwd()
        root = root or Path(__file__).resolve().parent.parent
        workspace = Workspace(root, os.environ if env is None else env, progress, runner)
        verb, arguments = argv[0], list(argv[1:])
        if verb == "test":
            line = test_line(workspace, arguments, cwd)
            os.chdir(root)
        else:
            line = command_line(workspace, verb, arguments, cwd)
        execute(line[0], line)
    except BootstrapError as error:
        progress.say(str(error))
        return error.code
    except KeyboardInterrupt:
        progress.say("stopped")
        return EXIT_STOPPED
    return 0
