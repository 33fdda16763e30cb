"""Every metric that a run writes: its stable name, its unit and what it says.

The one place of these names: `docs/reference/metrics.md` is written from it, and tests compare it with the
rows of real runs. A name may hold placeholders, `<kind>`, each for one or more characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Metric:
    """One metric. `when` says in which rows it stands; empty: in every row of its section."""

    name: str
    unit: str
    text: str
    when: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        """What matches the names that this entry stands for."""
        parts = re.split(r"<\w+>", self.name)
        return re.compile(".+".join(re.escape(part) for part in parts))


@dataclass(frozen=True)
class Section:
    """Metrics that come together; `rows` says which rows of `metrics.jsonl` have them."""

    title: str
    rows: str
    metrics: tuple[Metric, ...]


STEP = "each step of a run that trains on episodes"

SECTIONS = (
    Section(
        "Episodes of a step",
        STEP,
        (
            Metric(
                "rollout/episodes", "episodes", "episodes of the step's groups, failed and stale ones too"
            ),
            Metric(
                "rollout/reward_mean", "reward", "mean reward of those that may train", "some have a reward"
            ),
            Metric("rollout/pass_rate", "0..1", "share of rewards that are at least 1", "some have a reward"),
            Metric(
                "rollout/<environment>/<figure>",
                "as above",
                "episodes, infra_errors, reward_mean and pass_rate of one environment",
                "several environments",
            ),
            Metric("rollout/turns_mean", "turns", "mean turns of the model"),
            Metric("rollout/tokens", "tokens", "tokens that the model generated"),
            Metric("rollout/tokens_per_second", "tokens/s", "those of this attempt, by the time of the step"),
            Metric("rollout/refills", "episodes", "episodes that took the place of a failed or stale one"),
            Metric(
                "rollout/cancelled_stale",
                "episodes",
                "episodes ended early because their weights became too old",
            ),
            Metric(
                "rollout/discarded_stale",
                "episodes",
                "finished episodes that became too old while their group went on",
            ),
            Metric(
                "rollout/prefix_cache_hit_rate",
                "0..1",
                "share of the tokens given to the engines that these had in their prefix caches",
                "an engine was asked",
            ),
            Metric(
                "rollout/drift/<category>",
                "0..1",
                "share of the episodes looked at, one in eight, whose tokens differ so from their rendered "
                "text (see tokens are exact)",
                "some were looked at",
            ),
            Metric("rollout/in_flight", "episodes", "episodes that ran when the step took its groups"),
            Metric(
                "rollout/concurrency_limit",
                "episodes",
                "how many may run: `rollout.max_concurrent`, or what the engines bear of it",
            ),
            Metric("rollout/truncated_ratio", "0..1", "share that ran out of tokens or turns"),
            Metric(
                "outcome/<kind>",
                "episodes",
                "episodes with this outcome (see outcomes and budgets)",
                "there are any",
            ),
        ),
    ),
    Section(
        "Groups of a step",
        STEP,
        (
            Metric("groups/accepted", "groups", "groups that train"),
            Metric("groups/rejected", "groups", "groups that do not"),
            Metric(
                "groups/rejected/<reason>",
                "groups",
                "by reason: zero_variance, incomplete, stale, too_few_rewards, a filter's",
                "there are any",
            ),
            Metric("buffer/groups", "groups", "groups that wait for a later step (queue size)"),
            Metric("buffer/staleness_mean", "steps", "mean age of their samples", "some wait"),
            Metric("buffer/staleness_max", "steps", "age of the oldest of these", "some wait"),
            Metric(
                "staleness/mean",
                "steps",
                "mean age of trained samples: steps done since the weights of their oldest token",
                "some train",
            ),
            Metric("staleness/max", "steps", "age of the oldest", "some train"),
            Metric(
                "staleness/mixed_versions",
                "0..1",
                "share of trained samples with tokens of more than one weight version",
                "some train",
            ),
        ),
    ),
    Section(
        "Books of the training episodes",
        f"{STEP}; counts since the attempt began: submitted = trained + rejected + in_flight + buffered",
        (
            Metric("books/submitted", "episodes", "begun, and taken over from earlier attempts"),
            Metric("books/finished", "episodes", "of these, ended"),
            Metric("books/in_flight", "episodes", "running now"),
            Metric("books/buffered", "episodes", "ended well, and of whose group nothing is decided yet"),
            Metric("books/trained", "episodes", "trained; with those that are rejected, consumed"),
            Metric("books/rejected", "episodes", "will not train"),
            Metric(
                "books/rejected/<reason>",
                "episodes",
                "by reason: of the episode (infra_error, cancelled, stale, incomplete, timeout, truncated, "
                "no_tokens) or of its group",
                "there are any",
            ),
        ),
    ),
    Section(
        "Time of an episode",
        f"{STEP}, as means over its episodes",
        (
            Metric("episode/total_seconds", "s", "from its start to its end"),
            Metric("episode/create_seconds", "s", "waiting for its sandboxes"),
            Metric("episode/setup_seconds", "s", "entering the environment"),
            Metric("episode/agent_seconds", "s", "the agent, waits included"),
            Metric("episode/agent/command_seconds", "s", "of these: the agent's commands"),
            Metric(
                "episode/wait/engine_seconds",
                "s",
                "of these: waiting for an engine, a weight update or a retry",
            ),
            Metric("episode/verify_seconds", "s", "verification"),
            Metric("episode/teardown_seconds", "s", "giving sandboxes back"),
        ),
    ),
    Section(
        "Time of a step",
        "each step",
        (
            Metric("time/step", "s", "the whole step, without the evaluation that follows it"),
            Metric("time/train", "s", "the trainer's step"),
            Metric(
                "time/wait_groups", "s", "the trainer idle, waiting for groups", "the run trains on episodes"
            ),
            Metric("time/publish", "s", "writing the weights for the engines", "the run trains on episodes"),
            Metric("time/update", "s", "bringing them to every engine", "the run trains on episodes"),
            Metric(
                "time/checkpoint", "s", "writing the checkpoint that commits the step", "`checkpoint.every`"
            ),
            Metric(
                "loop/longest_wait_seconds",
                "s",
                "longest time so far that the driver's event loop was held up",
            ),
            Metric(
                "weights/version",
                "version",
                "version that the engines serve after the step",
                "the run trains on episodes",
            ),
        ),
    ),
    Section(
        "Routing",
        "each step of a run that trains on episodes; over the time since the step before, where not `now`",
        (
            Metric("router/workers", "workers", "engine workers now: engines, or their data-parallel ranks"),
            Metric(
                "router/offered", "workers", "those that get requests now: healthy, at the current weights"
            ),
            Metric("router/retries", "tries", "further tries of turns whose worker failed"),
            Metric("router/breaker_openings", "openings", "circuit breakers that opened"),
            Metric(
                "router/session_imbalance",
                "1..workers",
                "open sessions of the fullest worker over the mean, averaged over turns",
                "several workers served a turn",
            ),
            Metric(
                "router/token_imbalance",
                "1..workers",
                "tokens in flight at the busiest worker over the mean, averaged over turns",
                "several workers served a turn",
            ),
            Metric(
                "router/stickiness",
                "0..1",
                "share of turns, but for each session's first, on the worker of the turn before",
                "there was such a turn",
            ),
            Metric(
                "router/tokens_in_flight/<worker>",
                "tokens",
                "prompts and room for replies now at a worker: `2` is the third engine, `2.1` a rank of it",
            ),
        ),
    ),
    Section(
        "Sandboxes",
        "each step of a run with sandboxes; counts and seconds since the attempt began",
        (
            Metric("sandbox/live", "sandboxes", "alive now"),
            Metric("sandbox/creating", "sandboxes", "being made now"),
            Metric("sandbox/acquired", "sandboxes", "handed to an episode"),
            Metric("sandbox/creates", "sandboxes", "made"),
            Metric("sandbox/adopted", "sandboxes", "of these, found again after their create gave no answer"),
            Metric("sandbox/create_retries", "tries", "further tries of creates that failed"),
            Metric("sandbox/create_failures", "creates", "creates given up"),
            Metric("sandbox/deletes", "sandboxes", "deleted"),
            Metric("sandbox/delete_retries", "tries", "further tries of deletes that failed"),
            Metric(
                "sandbox/leaked", "sandboxes", "not deleted in the end; `rollhook sandboxes reap` finds them"
            ),
            Metric("sandbox/seconds", "s", "sandbox-seconds: lifetimes of all sandboxes together"),
            Metric(
                "sandbox/cost",
                "price",
                "what they cost by the backend's `prices`",
                "the price of every sandbox is known",
            ),
            Metric("sandbox/unpriced", "sandboxes", "whose price is not known"),
            Metric("sandbox/create_seconds_mean", "s", "mean time of a create"),
            Metric("sandbox/wait_seconds_mean", "s", "mean time an episode waited for one"),
        ),
    ),
    Section(
        "Evaluation",
        "each evaluation, in a row of its own with the step that it follows; "
        "greedy ones with `_greedy`, e.g. `eval/pass_rate_greedy`, `eval_family_greedy/sort`; "
        "with several environments `eval/<environment>/pass_rate`",
        (
            Metric("eval/pass_rate", "0..1", "share of the episodes that passed"),
            Metric("eval/stderr", "0..1", "its standard error; over tasks with several samples each"),
            Metric(
                "eval/pass_at_<samples>",
                "0..1",
                "unbiased share of tasks that pass at least once in so many samples",
                "`evaluation.samples` > 1",
            ),
            Metric("eval/episodes", "episodes", "episodes that are counted"),
            Metric("eval/errors", "episodes", "episodes without a verdict, not counted"),
            Metric("eval_family/<name>", "0..1", "pass rate of a family of tasks"),
            Metric("time/evaluate", "s", "the evaluation"),
            Metric("eval/pass_rate_greedy", "0..1", "the same, decoded greedily", "`evaluation.greedy`"),
            Metric("eval/stderr_greedy", "0..1", "its standard error", "`evaluation.greedy`"),
            Metric("eval/episodes_greedy", "episodes", "episodes that are counted", "`evaluation.greedy`"),
            Metric(
                "eval/pass_at_<samples>_greedy",
                "0..1",
                "share of tasks that pass at least once",
                "`evaluation.greedy`, `evaluation.samples` > 1",
            ),
            Metric("eval/errors_greedy", "episodes", "episodes without a verdict", "`evaluation.greedy`"),
            Metric(
                "eval_family_greedy/<name>", "0..1", "pass rate of a family of tasks", "`evaluation.greedy`"
            ),
            Metric(
                "eval/<environment>/<figure>",
                "as above",
                "the same for one environment",
                "several environments",
            ),
        ),
    ),
    Section(
        "Training",
        "each step that trains; every trainer's names start with `train/`, these are trainer torch's",
        (
            Metric("train/loss", "loss", "what is minimised, summed over the batch with its token weights"),
            Metric("train/lr", "1", "learning rate"),
            Metric("train/grad_norm", "1", "norm of the gradient before it is clipped"),
            Metric("train/entropy", "nats", "mean entropy of the policy at trained tokens"),
            Metric("train/tokens", "tokens", "trained tokens"),
            Metric("train/step_seconds", "s", "the trainer's own measure of the step"),
            Metric("train/sequences", "sequences", "trained sequences", "algorithm grpo"),
            Metric("train/ratio", "1", "mean importance ratio of trainer and engine", "algorithm grpo"),
            Metric(
                "train/clip_fraction", "0..1", "share of tokens whose ratio was clipped", "algorithm grpo"
            ),
            Metric(
                "train/logprob_diff",
                "nats",
                "mean difference of the trainer's log-probabilities and the engine's",
                "algorithm grpo",
            ),
            Metric(
                "train/kl", "nats", "mean KL divergence from the reference model", "`trainer.kl_coef` > 0"
            ),
            Metric("train/rows_seen", "rows", "rows of data taken so far", "algorithm sft"),
            Metric("train/<name>", "its own", "a figure of another trainer", "other trainers"),
        ),
    ),
)


@cache
def _entries() -> tuple[tuple[Metric, re.Pattern[str]], ...]:
    """The metrics with exact names first, then those with placeholders, the most specific before others."""
    every = [metric for section in SECTIONS for metric in section.metrics]
    return tuple((metric, metric.pattern) for metric in sorted(every, key=_vague))


def _vague(metric: Metric) -> tuple[bool, int]:
    return "<" in metric.name, -len(metric.name)


def find(name: str) -> Metric | None:
    """Return the entry of a metric; None for a name that is not listed."""
    return next((metric for metric, pattern in _entries() if pattern.fullmatch(name)), None)


def unlisted(names: Iterable[str]) -> set[str]:
    """Return the names that no entry of the table stands for."""
    return {name for name in names if find(name) is None}
