"""What this machine has or lacks for a recipe: files, secrets, room and tasks; problems of scope `site`."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollhook import budgets
from rollhook.environment import Environment, Task
from rollhook.errors import RollhookError
from rollhook.packs import PREFIX, resolve_all
from rollhook.recipe.composition import Composition
from rollhook.recipe.digests import digest_tasks
from rollhook.recipe.facts import is_hub_name, named_files, tasks_key
from rollhook.recipe.parts import Part
from rollhook.recipe.problem import Problem
from rollhook.secrets import Secret

#: below this a run's checkpoints and episodes are likely to fill the disk
_LEAST_FREE = 2 * 1024**3


def check_site(composition: Composition) -> Iterator[Problem]:
    """Yield what is wrong here."""
    yield from _files(composition)
    yield from _template(composition)
    yield from _storage(composition)
    yield from _secrets(composition)
    yield from _tasks(composition)


def _site(key: str, message: str, hint: str = "") -> Problem:
    return Problem(key, message, hint=hint, scope="site")


def _files(c: Composition) -> Iterator[Problem]:
    for key, name in named_files(c.recipe).items():
        if name.startswith((PREFIX, "needs:")) or key in c.loaded.unresolved:
            continue
        if c.asks_endpoint and key.startswith("model."):
            continue
        if key == "model.path" and c.recipe.checkpoint.load_from is not None:
            continue  # nothing is read from there
        if (key == "model.path" and is_hub_name(name)) or Path(name).expanduser().exists():
            continue
        yield _site(key, f"{name!r} does not exist here")


def _template(c: Composition) -> Iterator[Problem]:
    """Compare parsers that are named, and an agent that gives tools, with the chat template if it is here."""
    m, agent = c.recipe.model, c.part("agent")
    if m is None or c.asks_endpoint:
        return
    tools = agent is not None and agent.cls is not None and agent.cls.needs_tools
    if m.tool_parser == "auto" and m.reasoning_parser == "auto" and not tools:
        return
    from rollhook.reply.forms import mismatches
    from rollhook.session.template import read_json, shows_tools, template_text, token_variables

    directory = Path(m.tokenizer if isinstance(m.tokenizer, str) else m.path or "").expanduser()
    given = Path(m.chat_template).expanduser() if m.chat_template else None
    try:
        text = given.read_text("utf-8") if given else None
        config = read_json(directory / "tokenizer_config.json")
        template = template_text(directory, config, text)
    except (OSError, RollhookError):
        return  # it is not here, or `_files` says so
    for key, reason in mismatches(m.tool_parser, m.reasoning_parser, template).items():
        yield _site(f"model.{key}", reason, f"set model.{key}=auto, or name the right template")
    if tools and agent and not shows_tools(template, {**token_variables(config), **m.chat_template_kwargs}):
        where = given or directory
        yield _site(
            "model.chat_template",
            f"the chat template of {where} leaves out the tools that agent {agent.name} gives the policy",
            "name a template that shows them",
        )


def _storage(c: Composition) -> Iterator[Problem]:
    root = Path(c.recipe.storage.root).expanduser().absolute()
    there = next(path for path in (root, *root.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield _site(
            "storage.root",
            f"{str(root)!r} cannot be written: {there} is not a directory that you may write to",
        )
    elif shutil.disk_usage(there).free < _LEAST_FREE:
        free = shutil.disk_usage(there).free / 1024**3
        yield _site(
            "storage.root",
            f"{str(root)!r} has {free:.1f} GiB left",
            "make room, or set storage.root elsewhere",
        )


def _secrets(c: Composition) -> Iterator[Problem]:
    from rollhook.recipe.check import secret_fields

    found: list[tuple[str, Secret]] = [*secret_fields(c.parts.parts)]
    if c.recipe.gateway.token is not None:
        found.append(("gateway.token", c.recipe.gateway.token))
    for key, secret in found:
        reason = secret.absent()
        if reason:
            yield _site(key, reason)


def _tasks(c: Composition) -> Iterator[Problem]:
    """Build sandbox and environments (no I/O), let these say what they miss, and read the tasks' limits."""
    sandbox = c.part("sandbox")
    built = c.parts.build(sandbox) if sandbox else None
    if isinstance(built, Problem):
        yield built
    elif sandbox and built is not None:
        yield from (_site(f"{sandbox.key}.use", reason) for reason in built.missing())
    capabilities = getattr(built, "capabilities", None)
    for part, use in zip(c.parts.of("environment"), c.recipe.environment, strict=False):
        splits = {} if c.evaluating else {f"{part.key}.split": use.split}
        if c.recipe.evaluation.every or c.evaluating:
            splits["evaluation.split"] = c.recipe.evaluation.split
        yield from _environment(c, part, splits, capabilities)


def _environment(
    c: Composition,
    part: Part,
    splits: Mapping[str, str],
    capabilities: frozenset[str] | None,
) -> Iterator[Problem]:
    environment: Environment | Problem | None = _build(c, part)
    if environment is None or isinstance(environment, Problem):
        yield from [environment] if environment else []
        return
    found: dict[str, Sequence[Task]] = {}
    absent: list[Problem] = []
    for key, split in splits.items():
        try:
            found[key] = environment.tasks(split)
        except (RollhookError, OSError) as error:
            absent.append(_site(key, str(error)))
    if capabilities is not None:
        asked = None if absent else [task for tasks in found.values() for task in tasks]
        for reason in environment.problems(capabilities, asked):
            yield Problem(part.key, f"{part.name} does not fit this sandbox: {reason}")
    yield from absent
    for key, tasks in found.items():
        c.loaded.met[tasks_key(part.key, splits[key])] = digest_tasks(tasks)
        yield from _split(c, key, splits[key], tasks)


def _split(c: Composition, key: str, split: str, tasks: Sequence[Task]) -> Iterator[Problem]:
    usable = [task for task in tasks if task.problem is None]
    if not usable:
        reason = next((f"; the first: {task.problem}" for task in tasks), "")
        yield _site(key, f"split {split!r} has no task that can run{reason}")
        return
    for node in ("create", "setup", "agent", "verify"):
        cap = getattr(c.recipe.budgets, node)
        over = [task for task in usable if cap is not None and task.limits.get(node, 0) > cap]
        if over:
            most = max(task.limits[node] for task in over)
            yield _site(
                f"budgets.{node}",
                f"{cap:g} s is less than {len(over)} of {len(usable)} tasks of split {split!r} ask for "
                f"(up to {most:g} s, {over[0].id})",
                f"raise it: budgets.{node}={most:g}",
            )
    lifetime = c.recipe.budgets.lifetime
    if lifetime is not None:
        needed = max(_lifetime(c, task) for task in usable)
        if lifetime < needed:
            yield _site(
                "budgets.lifetime", f"{lifetime:g} s is less than tasks of split {split!r} need, {needed:g} s"
            )


def _lifetime(c: Composition, task: Task) -> float:
    limits = budgets.resolve(c.recipe.budgets, task.limits)
    parts = limits.create + limits.setup + limits.agent + limits.verify + limits.teardown
    return parts + c.recipe.budgets.slack


def _build(c: Composition, part: Part) -> Any:
    """Return the component with `pack:` references turned into paths, None, or a problem, as `build` does."""
    try:
        keys = resolve_all(part.keys, c.parts.plugins)
    except (RollhookError, OSError) as error:
        return _site(part.key, str(error))
    return c.parts.build(dataclasses.replace(part, keys=keys))
