"""What `rollhook check` finds out about a recipe that serves with SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollhook.engine.server_info import release
from rollhook.recipe.problem import Problem
from rollhook_sglang import releases
from rollhook_sglang.command import Start, command
from rollhook_sglang.config import SGLangConfig
from rollhook_sglang.options import options_of


def problems(config: SGLangConfig) -> Iterator[Problem]:
    """Yield a release that is not supported, and what the SGLang of this machine lacks."""
    if config.version is not None and not releases.supported(config.version):
        yield Problem("engine.version", releases.unsupported(config.version))
        return
    found = releases.installed(config.python, config.env)
    if found is None:
        yield Problem(
            "engine.python",
            f"{config.python or 'this Python'} has no SGLang",
            hint="install it there (pip install sglang), or name an interpreter that has it",
            scope="site",
        )
        return
    if config.version is not None and release(found.version) != release(config.version):
        yield Problem(
            "engine.version",
            f"SGLang {found.version} is installed here, not {config.version}",
            hint="leave it out: the interpreter is asked then",
            scope="site",
        )
    elif not releases.supported(found.version):
        yield Problem("engine.python", releases.unsupported(found.version), scope="site")
    else:
        yield from _unknown(config, found)


def _unknown(config: SGLangConfig, found: releases.Installed) -> Iterator[Problem]:
    """Yield the options that the installed release does not have."""
    known = options_of(found.package)
    start = Start(Path("model"), 1, config.host, 1, 0)
    for argument in command(config, found.version, start)[3:]:
        option = argument.partition("=")[0]
        if known and option.startswith("--") and option not in known:
            ours = option not in {each.partition("=")[0] for each in config.extra_args}
            yield Problem(
                "engine" if ours else "engine.extra_args",
                f"SGLang {found.version}, which is installed here, has no option {option}",
                scope="site",
            )
