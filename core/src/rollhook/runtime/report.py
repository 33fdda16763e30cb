"""`report.html`: one page about a run that needs nothing else, no network and no script.

What models, sandboxes and filters said is hostile: the template escapes every value, control and
direction-changing characters become escapes, and the page's policy allows nothing but its own style.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rollhook
from rollhook.durable import write_atomic
from rollhook.heartbeat import moving
from rollhook.rundir import RunDir
from rollhook.runtime import charts
from rollhook.runtime.figures import Figures, Tally, read_figures
from rollhook.runtime.results import RunResult, read_result
from rollhook.runtime.transcript import cut, duration, transcript
from rollhook.runtime.vitals import state_of
from rollhook.terminal import plain

if TYPE_CHECKING:
    from jinja2 import Template

NAME = "report.html"
#: rows of a table that are shown
MAX_ROWS = 200
TALLY = ("episodes", "pass rate", "mean reward", "refills", "infra errors", "groups rejected")
OUTCOME_COLOURS = {"scored": 2, "timeout": 4, "truncated": 1, "infra_error": 5, "cancelled": 7}
#: figure -> (label, colour)
EPISODE_PARTS = {
    "wait_sandbox": ("wait for sandbox", 5),
    "setup": ("set up", 4),
    "wait_engine": ("wait for engine", 1),
    "generate": ("generate", 0),
    "tool": ("tools", 2),
    "agent_other": ("the agent's own", 6),
    "verify": ("verify", 3),
    "teardown": ("tear down", 7),
    "other": ("other", 7),
}
DRIVER_PARTS = {
    "train": ("train", 0),
    "idle": ("idle: wait for groups", 5),
    "publish": ("publish weights", 4),
    "update": ("update engines", 1),
    "checkpoint": ("checkpoint", 3),
    "evaluate": ("evaluate", 2),
    "other": ("other", 7),
}
STATE_TEXTS = {"running": "in progress", "dead": "died"}


def write_report(run: RunDir, output: Path | None = None, *, watch: Callable[..., set[Any]] = moving) -> Path:
    """Write the page about a run, by default into its directory, and return its path.

    Blocks on the disk; a driver calls it off the loop once its attempt has ended. Raises RunError when the
    page cannot be written; what cannot be read is said on it.
    """
    page = render(run, read_figures(run), state_of(run.newest_attempt(), watch))
    path = output or run.path / NAME
    write_atomic(path, page.encode())
    return path


def render(run: RunDir, figures: Figures, state: str) -> str:
    """Return the page."""
    lock, result = _lock(run), read_result(run.path)
    style = files("rollhook.runtime").joinpath("report.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return _template().render(
        run_id=run.run_id,
        state=state.replace(" ", "-"),
        state_text=STATE_TEXTS.get(state, state),
        style=style,
        style_hash=f"sha256-{digest}",
        rollhook=rollhook.__version__,
        composition=_composition(lock),
        lifetime=_lifetime(run),
        figures=figures,
        tiles=[dict(zip(("name", "value", "note"), tile, strict=True)) for tile in _tiles(figures, lock)],
        charts=list(_charts(figures)),
        splits=list(_splits(figures)),
        tables=list(_tables(figures, lock)),
        facts=_facts(run, figures, lock, result),
        best=[transcript(record) for record in figures.best],
        worst=[transcript(record) for record in figures.worst],
    )


def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    def shown(value: Any) -> Any:
        return plain(value) if type(value) is str else value

    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=shown)
    return environment.from_string(files("rollhook.runtime").joinpath("report.html").read_text())


def _lock(run: RunDir) -> Mapping[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(run.lock_path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _composition(lock: Mapping[str, Any]) -> list[str]:
    """Return what the run is composed of, in a few words."""
    recipe = lock.get("recipe") or {}
    found = [f"recipe {recipe['name']}"] if "name" in recipe else []
    for kind in ("environment", "agent", "sandbox", "engine", "trainer"):
        uses = recipe.get(kind) or []
        names = [use["use"] for use in (uses if isinstance(uses, list) else [uses]) if "use" in use]
        found += [f"{kind} {', '.join(names)}"] if names else []
    return found


def _lifetime(run: RunDir) -> str:
    attempts = run.attempts()
    if not attempts:
        return "no attempt yet"
    started = attempts[0].owner.get("claimed_at")
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started)) if started else "at an unknown time"
    tries = f", {len(attempts)} attempts" if len(attempts) > 1 else ""
    return f"started {when} on {attempts[0].owner.get('host', 'an unknown host')}{tries}"


def _tiles(figures: Figures, lock: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    wanted = (lock.get("recipe") or {}).get("steps")
    done = int(figures.steps[-1]["step"]) if figures.steps else 0
    yield "steps", f"{done:,}", f"of {wanted:,}" if isinstance(wanted, int) else ""
    train = [tally for key, tally in figures.tasks.items() if key.purpose == "train"]
    rates = [row["rollout/pass_rate"] for row in figures.steps if "rollout/pass_rate" in row]
    if rates:
        few = max(1, len(rates) // 10)
        yield "pass rate", f"{_mean(rates[-few:]):.3f}", f"{_mean(rates[:few]):.3f} at first"
    sampled = [each for each in figures.evaluations if each["mode"] == "sampled"] or figures.evaluations
    if sampled:
        first, last = sampled[0], sampled[-1]
        note = f"{first['pass_rate']:.3f} at step {first['step']}" if len(sampled) > 1 else ""
        yield "held-out", f"{last['pass_rate']:.3f} ± {last.get('stderr', 0):.3f}", note
    if figures.episodes:
        again = f"{figures.superseded:,} more superseded" if figures.superseded else ""
        yield "episodes", f"{figures.episodes:,}", again
        errors = figures.outcomes["infra_error"]
        yield "infra errors", f"{errors:,}", f"{errors / figures.episodes:.1%} of the episodes"
    if train:
        yield "refills", f"{sum(tally.refills for tally in train):,}", "episodes in another's place"
        rejected = sum(tally.rejected.total() for tally in train)
        yield "groups rejected", f"{rejected:,}", ""
    if figures.tokens:
        yield "tokens", _short(figures.tokens), "generated for training"
    if seconds := figures.sandboxes.get("seconds"):
        yield "sandbox time", duration(seconds), f"{figures.sandboxes.get('creates', 0):,.0f} sandboxes"
    if (cost := figures.sandboxes.get("cost")) is not None:
        yield "sandbox cost", f"{cost:,.4g}", "by the prices of the recipe"
    wall = sum(figures.driver_seconds.values())
    if wall:
        idle = figures.driver_seconds.get("idle", 0.0)
        yield "time", duration(wall), f"{idle / wall:.0%} idle for groups" if idle else ""


def _charts(figures: Figures) -> Iterator[dict[str, Any]]:
    steps = figures.steps

    def points(name: str) -> list[charts.Point]:
        return [(row["step"], row[name]) for row in steps if name in row]

    passes, rewards = points("rollout/pass_rate"), points("rollout/reward_mean")
    series = []
    if passes:
        same = all(abs(a[1] - b[1]) < 1e-9 for a, b in zip(passes, rewards, strict=False))
        series.append(charts.Series("pass rate (equals the mean reward)" if same else "pass rate", passes, 0))
        if not same:
            series.append(charts.Series("mean reward", rewards, 1))
    for number, (label, found) in enumerate(_evaluations(figures).items()):
        series.append(charts.Series(label, found[0], 2 + number % 4, found[1]))
    if series:
        yield _chart("Reward", charts.lines(series, low=0.0, high=1.0), series)
    elif losses := points("train/loss"):
        yield _chart("Loss", charts.lines([line := charts.Series("loss", losses, 0)]), [line])
    kinds = [kind for kind in OUTCOME_COLOURS if any(f"outcome/{kind}" in row for row in steps)]
    if kinds:
        with_any = [row for row in steps if "rollout/episodes" in row]
        stacks = {kind: [row.get(f"outcome/{kind}", 0.0) for row in with_any] for kind in kinds}
        drawn = charts.stacked([row["step"] for row in with_any], stacks, OUTCOME_COLOURS)
        legend = [(kind, OUTCOME_COLOURS[kind]) for kind in kinds]
        yield {"title": "Outcomes", "svg": drawn, "legend": legend, "unit": "episodes of each step"}
    ages = points("staleness/max")
    if any(age for _, age in ages):
        lines = [
            charts.Series("oldest trained sample", ages, 1),
            charts.Series("mean", points("staleness/mean"), 0),
        ]
        yield _chart(
            "Staleness",
            charts.lines(lines, low=0.0, high=1.0),
            lines,
            "steps behind the weights that it trains",
        )


def _chart(title: str, svg: str, series: Sequence[charts.Series], unit: str = "") -> dict[str, Any]:
    return {"title": title, "svg": svg, "legend": [(s.label, s.colour) for s in series], "unit": unit}


def _evaluations(figures: Figures) -> dict[str, tuple[list[charts.Point], list[float]]]:
    """Return the held-out pass rates and their standard errors over steps, by label."""
    found: dict[str, tuple[list[charts.Point], list[float]]] = {}
    for each in figures.evaluations:
        label = " ".join(filter(None, ["held-out", each["environment"], each["mode"], "± standard error"]))
        values, errors = found.setdefault(label, ([], []))
        values.append((each["step"], each["pass_rate"]))
        errors.append(each.get("stderr", 0.0))
    return found


def _splits(figures: Figures) -> Iterator[dict[str, Any]]:
    for title, seconds, parts in (
        ("Of the episodes", figures.episode_seconds, EPISODE_PARTS),
        ("Of the driver", figures.driver_seconds, DRIVER_PARTS),
    ):
        total = sum(seconds.values())
        if total <= 0:
            continue
        shown = {label: seconds.get(name, 0.0) for name, (label, _) in parts.items()}
        colours = dict(parts.values())
        yield {
            "title": title,
            "total": f"{duration(total)} in all",
            "svg": charts.shares(shown, colours),
            "legend": [(n, colours[n], f"{value / total:.1%}") for n, value in shown.items() if value],
        }


def _tables(figures: Figures, lock: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    families = _families(figures)
    if families:
        several = len({environment for environment, _ in families}) > 1
        rows = [
            [
                *([name[0]] if several else []),
                name[1] or "all",
                *_tally(tally),
                *([_heldout(figures, name)] if figures.evaluations else []),
            ]
            for name, tally in families.items()
        ]
        head = [*(["environment"] if several else []), "family", *TALLY]
        yield _table("Families", [*head, *(["held-out"] if figures.evaluations else [])], rows)
    if figures.tasks:
        troubled = sorted(
            figures.tasks.items(), key=lambda item: (-_trouble(item[1]), item[1].pass_rate or 0.0)
        )
        rows = [[key.task_id, key.family, key.purpose, *_tally(tally)] for key, tally in troubled[:MAX_ROWS]]
        folded = f"{len(troubled):,} tasks, those with refills, errors and rejections first"
        left = len(troubled) - len(rows)
        yield _table("Tasks", ["task", "family", "for", *TALLY], rows, left=left, folded=folded)
    if figures.causes:
        common = figures.causes.most_common(20)
        rows = [[str(count), boundary, cut(cause, 400)] for (boundary, cause), count in common]
        left = len(figures.causes) - len(common)
        yield _table("What made episodes fail", ["episodes", "boundary", "cause"], rows, left=left)
    deviations = lock.get("deviations") or {}
    if deviations:
        rows = [
            [key, _value(each.get("value")), _value(each.get("reference")), str(each.get("from", ""))]
            for key, each in list(deviations.items())[:MAX_ROWS]
        ]
        head = ["key", "value", "reference", "from"]
        yield _table("What deviates from the recipe", head, rows, left=len(deviations) - len(rows))


def _families(figures: Figures) -> dict[tuple[str, str], Tally]:
    """Return the tallies of the episodes that were made to train, else (in an evaluation) of all."""
    whole = figures.families()
    train = {key[:2]: tally for key, tally in whole.items() if key[2] == "train"}
    return train or {key[:2]: tally for key, tally in whole.items()}


def _tally(tally: Tally) -> list[str]:
    rejected = ", ".join(f"{count} {reason}" for reason, count in tally.rejected.most_common())
    return [
        f"{tally.episodes:,}",
        *("" if value is None else f"{value:.3f}" for value in (tally.pass_rate, tally.reward_mean)),
        *(f"{count:,}" if count else "" for count in (tally.refills, tally.errors)),
        rejected,
    ]


def _trouble(tally: Tally) -> int:
    return tally.refills + tally.errors + tally.rejected.total()


def _heldout(figures: Figures, name: tuple[str, str]) -> str:
    """Return a family's first and last held-out pass rate."""
    label = name[1] or "all"
    found = [each for each in figures.evaluations if each["mode"] == "sampled"]
    mine = [each["families"] for each in found if each["environment"] in ("", name[0])]
    rates = [f"{families[label]:.3f}" for families in mine if label in families]
    return " → ".join(rates if len(rates) < 2 else (rates[0], rates[-1]))


def _facts(
    run: RunDir, figures: Figures, lock: Mapping[str, Any], result: RunResult | None
) -> list[list[str]]:
    """Return how the run was made and driven: (name, text)."""
    rows = [["recipe", ", ".join(str(source) for source in lock.get("sources") or [])]]
    rows += [[name, text] for name, text in (result.notes if result is not None else {}).items()]
    rows += [["checkpoint", result.checkpoint]] if result is not None and result.checkpoint else []
    for attempt in run.attempts():
        base = f", from step {figures.bases[attempt.number]}" if figures.bases.get(attempt.number) else ""
        ended = attempt.status or "no end recorded"
        rows.append([f"attempt {attempt.number}", f"{attempt.describe_owner()}{base}: {ended}"])
    versions = lock.get("versions") or {}
    rows.append(["versions", ", ".join(f"{name} {version}" for name, version in versions.items())])
    return rows


def _table(
    title: str, head: list[str], rows: list[list[str]], *, left: int = 0, folded: str = ""
) -> dict[str, Any]:
    notes = [f"{left:,} more are in `rollhook report --json`."] if left > 0 else []
    return {"title": title, "head": head, "rows": rows, "notes": notes, "folded": folded}


def _value(value: Any) -> str:
    return cut(value if isinstance(value, str) else json.dumps(value, default=str), 300)


def _short(number: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {letter}"
    return f"{number:g}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
