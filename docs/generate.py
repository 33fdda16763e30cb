"""Writes docs/reference from the code: `python docs/generate.py`; a test says when it is out of date."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
from pydantic.fields import FieldInfo

from rollhook import hookspecs
from rollhook.cli.main import VERBS, LazyCommand
from rollhook.component import Component
from rollhook.metric_names import SECTIONS
from rollhook.recipe.load import read_recipe
from rollhook.recipe.names import names_in
from rollhook.recipe.schema import Recipe
from rollhook.secrets import Secret

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs/reference"
NOTE = "<!-- Written by docs/generate.py from the code; do not edit. -->\n\n"
INTERFACES = [
    (
        "Sandbox backends",
        "rollhook.sandbox.backend",
        ["SandboxBackend", "RawSandbox", "RawProcess", "SandboxSpec"],
    ),
    ("Sandboxes, as callers see them", "rollhook.sandbox.sandbox", ["Sandbox", "ExecResult"]),
    ("Environments", "rollhook.environment", ["Environment", "Episode", "Phase", "Task", "Box", "Verdict"]),
    ("Agents", "rollhook.agent", ["Agent", "AgentContext", "ChatSession", "Budget", "Reply", "Endpoint"]),
    ("Router policies", "rollhook.router", ["RouterPolicy", "RouteRequest", "WorkerLoad", "Worker"]),
    ("Engines", "rollhook.engine.base", ["Engine", "Placement", "Generation", "SamplingParams"]),
    (
        "Engines that take messages",
        "rollhook.engine.messages",
        ["MessageEngine", "MessageRequest", "Completion", "Usage", "RequestLimits", "BusyError"],
    ),
    ("Trainers", "rollhook.trainer", ["NativeTrainer", "HostedTrainer", "Place", "Rendered"]),
    ("Episodes for a framework that hosts us", "rollhook.runtime.hosted", ["HostedEpisodes", "Row"]),
    ("Trackers", "rollhook.tracker", ["Tracker"]),
    ("Packs", "rollhook.pack", ["Pack"]),
    (
        "Launchers",
        "rollhook.launcher",
        ["Launcher", "Job", "Plan", "Handle", "JobStatus", "Clusters", "ClusterInfo", "ClusterOptions"],
    ),
    ("What every component is built with", "rollhook.component", ["Component", "BuildContext", "Config"]),
    ("Records", "rollhook.records", ["Sample", "EpisodeRecord", "Outcome", "Group"]),
]
#: verbs that the plugins of this repository add
ADDED = {
    "code": ("rollhook_ray.verbs.code:app", "Keep versions of code on shared storage."),
    "dev": ("rollhook_kuberay.dev:app", "Keep a pod on Kubernetes to work in."),
    "serve": ("rollhook_tools.serve.command:serve", "Serve an environment to the clients of others."),
    "workload": ("rollhook_ray.verbs.workload:app", "Run verl's workloads on a Ray cluster."),
}
ENVIRONMENT = """\
## Environment variables

A recipe says what a run does; these only say where things are on this machine.

| variable | meaning |
|---|---|
| `XDG_STATE_HOME` | The index of runs is in `rollhook/runs` below it (default `~/.local/state`). |
| `XDG_CACHE_HOME` | Generated packs are in `rollhook/packs` below it (default `~/.cache`). |
| `XDG_RUNTIME_DIR` | Local sandboxes keep small files of their own there while they live. |
| `ROLLHOOK_TORCH_INDEX` | For `python3 core` alone: the package index from which torch is installed. |
| `ROLLHOOK_FAILPOINT` | For tests of crashes: `NAME[:HIT]`, the durable write to die at. |
| `ROLLHOOK_EXEC` | Set by the runtime in sandboxes, to find all that a command has started; do not set it. |
| `ROLLHOOK_AGENT` | Set by the agent `command` on this machine, to find all that its program starts. |
| `ROLLHOOK_SESSION_URL`, `ROLLHOOK_MODEL` | Set by it for its program: its session, the model's name. |
| `ROLLHOOK_TASK`, `ROLLHOOK_TASK_FILE` | Set by it as well: the task, or the file that holds it. |
| `ROLLHOOK_RUN_ID`, `ROLLHOOK_ATTEMPT` | Set in a job: the run, and which attempt at it this is. |
| `ROLLHOOK_JOB_DIR`, `ROLLHOOK_JOB_FILES` | Set in a job: its attempt's directory, and its script's. |
| `ROLLHOOK_SIGNALS` | Set for a moment by a job's script that was started with interrupts ignored. |
| `ROLLHOOK_SLURM_JOB`, `ROLLHOOK_SLURM_CPUS` | Set on the nodes of a Slurm job: its number, their CPUs. |
| `ROLLHOOK_SLURM_NODE`, `ROLLHOOK_SLURM_INDEX` | Set there as well: the node, and its place among them. |
| `ROLLHOOK_SLURM_NODES` | Set there as well: all nodes. SLURM's own variables are kept out of Ray. |
| `ROLLHOOK_CLUSTER_NODE` | Set for what `rollhook cluster up` starts on a node, to find it. |
| `ROLLHOOK_USER` | Owner of what is made on Kubernetes, in place of the account's name. |
| `ROLLHOOK_TELLS_ALL` | Set by launchers whose scheduler signals all of a job's processes itself. |
| `ROLLHOOK_WORKER_RESOURCE` | Set by launchers: a Ray resource that only nodes for work have. |
| `ROLLHOOK_CACHE` | Where packs are kept; a job on a Ray cluster has `<storage.root>/.cache`. |
| `ROLLHOOK_K8S_SECRETS` | Where a job on Kubernetes has its Secrets (default `/var/run/rollhook/secrets`). |
| `ROLLHOOK_TEST_IMAGE` | For tests at `DOCKER_HOST`: an image with bash, coreutils and python3. |

A secret is named in a recipe by a reference such as `env:NAME`, and read from the variable of that name
([secrets](../how-to/secrets.md)).
"""


def type_text(annotation: Any) -> str:
    """Return a type as a reader of YAML would put it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_text(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if a is types.NoneType else type_text(a) for a in arguments)
    if origin is typing.Literal:
        return " or ".join(f"`{a}`" for a in arguments)
    if origin in (list, tuple):
        inner = [type_text(a) for a in arguments if a is not Ellipsis]
        return f"list of {inner[0]}" if len(set(inner)) == 1 else f"[{', '.join(inner)}]"
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return f"mapping of {type_text(arguments[0])} to {type_text(arguments[1])}"
    names = {"str": "text", "int": "integer", "float": "number", "bool": "boolean", "Use": "component"}
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, "component" if name.endswith("Use") else name)


def limits_text(field: FieldInfo) -> str:
    """Return the limits of a field's value, e.g. `> 0`."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in signs.items()
        if getattr(item, name, None) is not None
    ]
    return f" ({', '.join(found)})" if found else ""


def default_text(field: FieldInfo) -> str:
    """Return a field's default as YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, pydantic.BaseModel):
        use = getattr(value, "use", None)
        return f"`{use}`" if use else ""
    shown = list(value) if isinstance(value, tuple) else value
    if shown in ({}, []):
        return "empty"
    if isinstance(shown, Secret):
        shown = str(shown)
    return f"`{json.dumps(shown, default=_plain)}`" if not isinstance(shown, str) else f"`{shown}`"


def _plain(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, pydantic.BaseModel) else str(value)


def section_of(annotation: Any) -> type[pydantic.BaseModel] | None:
    """Return the model of a nested section of core keys, if a field's type holds one."""
    if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        found = section_of(argument)
        if found is not None:
            return found
    return None


def cell(text: str) -> str:
    """Make text fit a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def key_table(model: type[pydantic.BaseModel], prefix: str = "") -> str:
    """Return the table of a model's keys, those of nested sections included."""
    rows = list(_rows(model, prefix))
    if not rows:
        return "No keys.\n"
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _rows(model: type[pydantic.BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        key = f"{prefix}{name}"
        kind = type_text(field.annotation) + limits_text(field)
        if section is not None and "component" not in kind:
            kind = kind.replace(section.__name__, "section")
        row = f"| `{key}` | {cell(kind)} | {cell(default_text(field))} | {cell(field.description or '')} |"
        yield row
        if section is not None:
            many = "[]" if kind.startswith("list") else ""
            yield from _rows(section, f"{key}{many}.")


def recipe_page() -> str:
    """Return the reference of the core's recipe keys."""
    return f"""{NOTE}# Recipe keys

The keys that belong to the core. A component's own keys stand beside its `use`; they are listed in
[components](components.md). `extends` names a recipe, or a list of them, to start from; it is read before
anything else. A router's `use` may chain policies with `+`; the keys of each stand under its name.

{key_table(Recipe)}"""


def doc(thing: Any) -> str:
    """Return a docstring as Markdown."""
    return inspect.cleandoc(thing.__doc__ or "")


def signature(function: Any) -> str:
    """Return a function's signature as it is written."""
    text = str(inspect.signature(function))
    return re.sub(r"'([^']*)'", r"\1", text)


def hooks_page() -> str:
    """Return the reference of the hook points."""
    text = f"""{NOTE}# Hook points

The surface of a plugin: `core/src/rollhook/hookspecs.py`. A plugin implements hooks as functions of the
module that its entry point names, marked with `rollhook.hookimpl`.
"""
    kinds = {hook: kind for kind, hook in hookspecs.PROVIDER_HOOKS.items()}
    for name, function in vars(hookspecs).items():
        if not name.startswith("rollhook_"):
            continue
        text += f"\n## {name}\n\n```python\ndef {name}{signature(function)}\n```\n\n{doc(function)}\n"
        if name in kinds:
            text += f"\nEntry points: `{kinds[name]}.NAME`.\n"
    return text


def components() -> Iterator[tuple[str, Component, str]]:
    """Yield (kind, component, distribution) of the workspace's plugins, in the order of the kinds."""
    found = []
    for file in [*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("envs/*/pyproject.toml")]:
        project = tomllib.loads(file.read_text())["project"]
        for entry, module in project["entry-points"]["rollhook"].items():
            kind, _, name = entry.partition(".")
            if kind in hookspecs.PROVIDER_HOOKS:
                supplied = getattr(importlib.import_module(module), hookspecs.PROVIDER_HOOKS[kind])()
                component = next(c for c in supplied if c.name == name)
                found.append((kind, component, project["name"]))
    order = list(hookspecs.PROVIDER_HOOKS)
    yield from sorted(found, key=lambda item: (order.index(item[0]), item[1].name))


def components_page() -> str:
    """Return the reference of the components that are in this repository."""
    text = f"""{NOTE}# Components

What the distributions of this repository supply; `rollhook plugins` lists what is installed,
`rollhook show NAME` describes one.
"""
    last = ""
    for kind, component, distribution in components():
        if kind != last:
            text += f"\n## {kind}\n"
            last = kind
        text += f"\n### {kind}.{component.name}\n\n{component.summary[:1].upper()}{component.summary[1:]}. "
        text += f"From `{distribution}`, class `{component.load}`.\n\n{key_table(component.config)}"
    return text


def hosted_page() -> str:
    """Return what becomes of each key of a recipe under each framework that hosts us."""
    trainers = {}
    for kind, component, _ in components():
        module, _, name = component.load.partition(":")
        cls = getattr(importlib.import_module(module), name) if kind == "trainer" else None
        if cls is not None and cls.hosted:
            trainers[component.name] = cls
    names = list(trainers)
    rows = []
    for row in _rows(Recipe, ""):
        key = row.split("`")[1]
        treated = [trainers[name].treats(key.replace("[]", "")) for name in names]
        rows.append(f"| `{key}` | {' | '.join(treated)} |")
    header = f"| key | {' | '.join(names)} |\n|---|{'---|' * len(names)}"
    return f"""{NOTE}# Hosted trainers: what becomes of each key

A hosted trainer is a framework that owns the training loop and the engines. Each key of a recipe is **run**
by us in the bridge that the framework calls for episodes, **rendered** into the framework's own settings, or
**refused** by `rollhook check` where a recipe gives it. How it is rendered: the pages of the trainers.

{header}
{chr(10).join(rows)}
"""


def interfaces_page() -> str:
    """Return the reference of the classes that plugins implement or use."""
    text = f"{NOTE}# Interfaces\n\nThe classes behind the hook points, as their docstrings have it.\n"
    for title, module, names in INTERFACES:
        text += f"\n## {title}\n\nModule `{module}`.\n"
        for name in names:
            text += interface(getattr(importlib.import_module(module), name))
    return text


def interface(cls: type) -> str:
    """Return the reference of one class: its docstring and its public methods."""
    text = f"\n### {cls.__name__}\n\n{doc(cls)}\n"
    for name, member in vars(cls).items():
        if name.startswith("_") or not (
            inspect.isfunction(member) or isinstance(member, classmethod | property)
        ):
            continue
        if isinstance(member, property):
            text += f"\n- **{name}** (property): {cell(doc(member))}\n"
            continue
        function = member.__func__ if isinstance(member, classmethod) else member
        keyword = "async def" if inspect.iscoroutinefunction(function) else "def"
        text += f"\n```python\n{keyword} {name}{signature(function)}\n```\n\n{doc(function)}\n"
    return text


def commands_page() -> str:
    """Return the reference of the command line."""
    text = f"""{NOTE}# Command line

`python3 core VERB ...` in a checkout, `rollhook VERB ...` where it is installed.

Exit codes: 0 success; 1 the job or the check failed; 2 wrong usage or an invalid recipe; 3 stopped;
124 waited too long. An error is one sentence on stderr with the way out; `--debug` adds the traceback.

{ENVIRONMENT}"""
    for verb, (target, summary) in (VERBS | ADDED).items():
        text += "".join(command_text(LazyCommand(verb, target, summary).real(), ["rollhook", verb]))
    return text


def command_text(command: Any, path: list[str]) -> Iterator[str]:
    """Yield the reference of a command and of those below it."""
    yield f"\n## {' '.join(path)}\n\n{inspect.cleandoc(command.help or '')}\n"
    rows = []
    for parameter in command.params:
        if parameter.name in ("help", "install_completion", "show_completion"):
            continue
        option = parameter.param_type_name == "option"
        name = ", ".join(parameter.opts) if option else parameter.metavar or str(parameter.name).upper()
        rows.append(f"| `{name}` | {cell(getattr(parameter, 'help', '') or '')} |")
    if rows:
        yield "\n".join(["\n| argument | meaning |", "|---|---|", *rows, ""])
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from command_text(child, [*path, name])


def recipes_page() -> str:
    """Return the reference of the shipped recipes: what each says of itself and names."""
    text = f"""{NOTE}# Recipes

The recipes of this repository; a shipped recipe is also found by its bare name (`rollhook run quickstart`).
"""
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        comment = [
            line.removeprefix("#").strip() for line in file.read_text().splitlines() if line[:1] == "#"
        ]
        names = ", ".join(f"`{kind}.{name}`" for kind, name in names_in(read_recipe(file).resolved))
        text += f"\n## {file.stem}\n\n{' '.join(comment)}\n\nNames {names}.\n"
    return text


def metrics_page() -> str:
    """Return the reference of the metrics that a run writes."""
    text = f"""{NOTE}# Metrics

What stands in a run's `metrics.jsonl` and goes to its trackers. A row has `schema`, `step` (steps done),
`attempt`, `time` (epoch seconds) and the metrics by these names, which are stable. A part in `<...>` stands
for any text.
"""
    for section in SECTIONS:
        text += f"\n## {section.title}\n\nIn {section.rows}.\n\n| metric | unit | meaning |\n|---|---|---|\n"
        for metric in section.metrics:
            when = f" (if: {metric.when})" if metric.when else ""
            text += f"| `{metric.name}` | {cell(metric.unit)} | {cell(metric.text + when)} |\n"
    return text


def pages() -> dict[Path, str]:
    """Return every page of the reference."""
    return {
        REFERENCE / "recipe.md": recipe_page(),
        REFERENCE / "recipes.md": recipes_page(),
        REFERENCE / "hooks.md": hooks_page(),
        REFERENCE / "components.md": components_page(),
        REFERENCE / "hosted-trainers.md": hosted_page(),
        REFERENCE / "interfaces.md": interfaces_page(),
        REFERENCE / "commands.md": commands_page(),
        REFERENCE / "metrics.md": metrics_page(),
    }


def main() -> int:
    """Write the pages; with --check only say which are out of date."""
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(ROOT)} is out of date: run `python docs/generate.py`\n")
        return 1 if stale else 0
    REFERENCE.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(pages()[path])
        sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
