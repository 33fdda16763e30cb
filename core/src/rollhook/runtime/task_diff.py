"""The reference solutions on two sandbox backends, and what differs there that is not the task's doing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollhook.agent import Agent, AgentContext, StopReason
from rollhook.component import BuildContext, Config
from rollhook.environment import Task
from rollhook.records import EpisodeRecord
from rollhook.rundir import Attempt
from rollhook.runtime.oracle import failure
from rollhook.runtime.parts import Parts
from rollhook.runtime.task_runs import Choose, TaskRuns, all_tasks, each

ABSENT = "-"
_SECONDS = 60.0
#: programs whose versions are compared
_PROGRAMS = (
    "sh bash python3 python perl awk sed grep find tar gzip xz git curl wget gcc make cmake node npm go "
    "cargo java openssl ssh sqlite3 jq tmux vim uv pip sudo su ps ip"
)
#: prints lines `topic<TAB>name<TAB>value`
_LOOK = rf"""
say() {{ printf '%s\t%s\t%s\n' "$1" "$2" "$(printf '%s' "$3" | head -n 1)"; }}
say user name "$(id -un 2>/dev/null)"; say user id "$(id -u)"; say user groups "$(id -G)"
say user home "$HOME"; say user umask "$(umask)"; say user directory "$(pwd)"
say user writable "$([ -w . ] && echo yes || echo no)"
say locale charmap "$(locale charmap 2>/dev/null)"; say locale timezone "$(date +%Z)"
env | grep -E '^[A-Za-z_][A-Za-z0-9_]*=' | grep -vE '^(ROLLHOOK_EXEC|PWD|OLDPWD|SHLVL|_|HOSTNAME)=' |
  while IFS= read -r line; do say environment "${{line%%=*}}" "${{line#*=}}"; done
for limit in n u v f c; do say limits "ulimit -$limit" "$(ulimit -$limit 2>/dev/null)"; done
say limits processors "$(nproc 2>/dev/null)"
say system kind "$(uname -sm)"; say system release "$(. /etc/os-release 2>/dev/null; echo "$PRETTY_NAME")"
say network interfaces "$(ls /sys/class/net 2>/dev/null | tr '\n' ' ')"
say network route "$(awk '$2 == "00000000" {{print "default"}}' /proc/net/route 2>/dev/null)"
say network loopback "$(grep -q 'lo:' /proc/net/dev 2>/dev/null && echo yes || echo no)"
say network resolver "$(grep -qs '^nameserver' /etc/resolv.conf && echo yes || echo no)"
for place in /tmp /var/tmp /root /home /dev/shm /dev/tty; do
  say places "$place" "$([ -e $place ] && stat -c '%A %U' $place 2>/dev/null)"
done
say places proc "$([ -r /proc/self/status ] && echo yes || echo no)"
for program in {_PROGRAMS}; do
  if command -v $program >/dev/null 2>&1; then
    case $program in
      ssh|tmux|ip) flag=-V;; java) flag=-version;; go|openssl) flag=version;; *) flag=--version;;
    esac
    version=$(timeout 5 $program $flag </dev/null 2>&1 | grep -m 1 '[0-9][.0-9]')
    say programs $program "${{version:-there}}"
  fi
done
"""


@dataclass(frozen=True)
class Difference:
    """One thing that differs; `tasks` are those where it does, in this way."""

    topic: str
    name: str
    first: str
    second: str
    tasks: Sequence[str] = ()


@dataclass
class Seen:
    """What one backend showed of one task: the verdict's facts, and those of its sandbox."""

    verdict: dict[str, str] = field(default_factory=dict)
    facts: dict[tuple[str, str], str] = field(default_factory=dict)


class Prober(Agent):
    """Notes what the sandbox is like, then applies the reference solution."""

    needs_policy = False
    needs_solution = True

    def __init__(self, context: BuildContext) -> None:
        super().__init__(Config(), context)
        self.printed: dict[str, str] = {}

    async def run(self, context: AgentContext) -> StopReason:
        """Look in the first phase, solve each."""
        if context.sandbox is not None and context.episode_id not in self.printed:
            result = await context.sandbox.exec(["/bin/sh", "-c", _LOOK], timeout=_SECONDS)
            self.printed[context.episode_id] = result.text
        assert context.solve is not None
        await context.solve()
        return StopReason.DONE


class Side(TaskRuns):
    """One of the two backends; a context manager."""

    def __init__(self, parts: Parts, attempt: Attempt, name: str, choose: Choose = all_tasks) -> None:
        self._prober = Prober(parts.context("agent.prober"))
        super().__init__(parts, attempt, (), {name: self._prober}, choose)
        self.name = name

    async def see(self, task: Task) -> Seen:
        """Run the solution of a task."""
        record = await self.episode(self.name, task)
        return Seen(_verdict(record), facts_of(self._prober.printed.pop(record.episode_id, "")))


async def compare(
    first: Side, second: Side, tasks: Sequence[Task], concurrency: int, finished: Callable[[Task, bool], None]
) -> list[Difference]:
    """Return every difference, verdicts first; `finished` gets each task and whether its verdicts agree."""
    pairs: dict[str, tuple[Seen, Seen]] = {}

    async def both(task: Task) -> None:
        seen = await first.see(task), await second.see(task)
        pairs[task.id] = seen
        finished(task, seen[0].verdict == seen[1].verdict)

    await each(tasks, concurrency, both)
    return differences({task.id: pairs[task.id] for task in tasks})


def differences(pairs: Mapping[str, tuple[Seen, Seen]]) -> list[Difference]:
    """Return what differs between the two of each pair; the same difference of several tasks is one row."""
    found: defaultdict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for task, (one, other) in pairs.items():
        sides = [
            {**{("verdict", name): value for name, value in seen.verdict.items()}, **seen.facts}
            for seen in (one, other)
        ]
        for key in dict.fromkeys([*sides[0], *sides[1]]):
            values = [side.get(key) or ABSENT for side in sides]
            if values[0] != values[1]:
                found[*key, values[0], values[1]].append(task)
    rows = [Difference(*key, tasks=tuple(tasks)) for key, tasks in found.items()]
    order = list(dict.fromkeys(row.topic for row in rows))
    return sorted(rows, key=lambda row: (row.topic != "verdict", order.index(row.topic), row.name))


def facts_of(printed: str) -> dict[tuple[str, str], str]:
    """Return what the probe printed, by topic and name; other lines are not its own."""
    rows = [line.split("\t", 2) for line in printed.splitlines() if line.count("\t") >= 2]
    return {(topic, name): value.strip() for topic, name, value in rows}


def _verdict(record: EpisodeRecord) -> dict[str, str]:
    reward = record.outcome.reward
    facts = {"reward": failure("oracle", record) if reward is None else f"{reward:g}"}
    for name, key in (
        ("exit code of the tests", "exit_code"),
        ("exit code of the solution", "solution_exit_code"),
    ):
        if key in record.detail:
            facts[name] = str(record.detail[key])
    return facts
