"""What a run shows while it runs, and the table at its end."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rollhook.records import EpisodeRecord
from rollhook.runtime.advisories import WINDOW, advise
from rollhook.runtime.evaluate import Evaluation, comparison
from rollhook.runtime.statistics import Rate
from rollhook.terminal import one_line, plain

#: seconds between two lines about one stretch of work, off a terminal
TELL_SECONDS = 30.0


class Display:
    """A live display on a terminal, plain lines elsewhere.

    Writes to stderr, so that stdout stays for what a machine reads.
    """

    def __init__(self, console: Console | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.console = console or _console()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._outcomes: Counter[str] = Counter()
        self._steps: list[float] = []
        self._rows: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._hints: dict[str, str] = {}
        self._said: set[str] = set()
        self._status = Text("")
        #: where the engine workers are, by their names in the metrics
        self.workers: Mapping[str, str] = {}
        self._live: Live | None = None
        self._doing: TaskID | None = None
        self._stretch, self._total, self._done, self._told = "", 0, 0, 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show the display of one run while the block runs."""
        self._outcomes.clear()
        self._steps.clear()
        self._rows.clear()
        self._hints.clear()
        self._said.clear()
        if not self.console.is_terminal:
            yield
            return
        shown = Group(self._status, self._bar)
        with Live(shown, console=self.console, refresh_per_second=8, redirect_stdout=False) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def take_logs(self) -> None:
        """Show warnings of every logger on the display."""
        handler = RichHandler(console=self.console, show_path=False, show_time=False)
        handler.setFormatter(_PlainFormatter("%(message)s"))
        logging.basicConfig(level=logging.WARNING, handlers=[handler])

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(plain(text), markup=False, soft_wrap=True)

    def begin(self, what: str, total: int) -> None:
        """Start a bar for a stretch of work; off a terminal a line says now and then how far it is."""
        self.end()
        self._stretch, self._total, self._done, self._told = what, total, 0, self._now()
        if self._live is not None:
            self._doing = self._bar.add_task(what, total=total)

    def advance(self) -> None:
        """One more of the current stretch is done."""
        self._done += 1
        if self._doing is not None:
            self._bar.advance(self._doing)
        elif self._live is None and self._stretch and self._now() >= self._told + TELL_SECONDS:
            self._told = self._now()
            self.say(f"{self._stretch}: {self._done} of {self._total}")

    def end(self) -> None:
        """The current stretch is over."""
        self._stretch = ""
        if self._doing is not None:
            self._bar.remove_task(self._doing)
            self._doing = None

    def episode(self, record: EpisodeRecord) -> None:
        """Count a finished episode."""
        self._outcomes[record.outcome.kind] += 1
        self.advance()

    def step(self, step: int, steps: int, metrics: Mapping[str, float], every: int) -> None:
        """Show a finished step, off a terminal every `every`-th only; and a hint when it comes up first."""
        self._steps.append(time.monotonic())
        line = self._line(step, steps, metrics)
        if "rollout/episodes" in metrics:
            self._rows.append(metrics)
            self._hints = advise(list(self._rows), self._hints, self.workers)
        for name in self._hints.keys() - self._said:
            self.say(f"Hint: {self._hints[name]}.")
        self._said |= self._hints.keys()
        self._status.plain = "\n".join([line, *(f"  {hint}" for hint in self._hints.values())])
        if self._live is None and (step % every == 0 or step == steps):
            self.say(line)

    def _line(self, step: int, steps: int, metrics: Mapping[str, float]) -> str:
        parts = [f"step {step}/{steps}"]
        shown = {
            "rollout/pass_rate": "pass {:.2f}",
            "train/loss": "loss {:.3f}",
            "rollout/tokens_per_second": "{:.0f} tokens/s",
            "episode/create_seconds": "sandbox {:.3f} s",
            "sandbox/cost": "sandboxes cost {:.4g}",
        }
        parts += [form.format(metrics[name]) for name, form in shown.items() if name in metrics]
        if self._outcomes:
            parts.append(", ".join(f"{count} {kind}" for kind, count in sorted(self._outcomes.items())))
        recent = self._steps[-20:]
        if len(recent) > 1 and step < steps:
            pace = (recent[-1] - recent[0]) / (len(recent) - 1)
            parts.append(f"ETA {_clock(pace * (steps - step))}")
        return " | ".join(parts)


class _PlainFormatter(logging.Formatter):
    """Messages quote endpoints and sandboxes."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def summaries(evaluations: Sequence[Evaluation]) -> list[Table]:
    """Return, for each environment, a table of its first against its last evaluation, by family."""
    names = dict.fromkeys(e.environment for e in evaluations)
    tables = [_summary(name, [e for e in evaluations if e.environment == name]) for name in names]
    return [table for table in tables if table is not None]


def _summary(environment: str, evaluations: Sequence[Evaluation]) -> Table | None:
    """Return the table of one environment, or None without two evaluations of one mode."""
    where = f" of {environment}" if environment else ""
    table = Table(title=f"Held-out pass rate{where}, before and after", title_justify="left")
    table.add_column("family")
    rows: dict[str | None, list[str]] = {}
    for mode in ("sampled", "greedy"):
        found = [e for e in evaluations if e.mode == mode]
        if len(found) < 2:
            continue
        for name in (f"{mode}: step {found[0].step}", f"step {found[-1].step}", "gain"):
            table.add_column(name, justify="right")
        *families, (_, total_before, total_after) = comparison(found[0], found[-1])
        if [family for family, *_ in families] == [""]:
            families = []  # one family without a name: the total says it
        lines: list[tuple[str | None, Rate, Rate]] = [*families, (None, total_before, total_after)]
        for family, before, after in lines:
            rows.setdefault(family, []).extend(
                [
                    str(before),
                    str(after),
                    f"{after.value - before.value:+.3f}" if before.count and after.count else "",
                ]
            )
    if not rows:
        return None
    total = rows.pop(None)
    for family, cells in rows.items():
        table.add_row(escape(one_line(family or "(none)")), *cells)
    table.add_section()
    table.add_row("all", *total)
    return table


def _console() -> Console:
    """Return the console on stderr; what is no terminal gets lines long enough for the tables."""
    console = Console(stderr=True, highlight=False)
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=120)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
