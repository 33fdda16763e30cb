"""The keys of a recipe that belong to the core; a component's own keys belong to its config model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt

from rollhook.secrets import Secret


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Use(BaseModel):
    """A component by name with its own keys (checked against the plugin's config model, not here)."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    use: Annotated[str, Field(description="name of the plugin component, as `rollhook plugins` lists it")]

    @property
    def keys(self) -> dict[str, Any]:
        """The component's own keys."""
        return dict(self.__pydantic_extra__ or {})


class EnvironmentUse(Use):
    """An environment by name; core keys beside the environment's own."""

    weight: Annotated[PositiveFloat, Field(description="share of episodes when there are several")] = 1.0
    split: Annotated[str, Field(description="split of the tasks to train on")] = "train"


class CreateRateUse(_Section):
    """How fast sandboxes are created, by all processes of this host together."""

    per_second: Annotated[float, Field(ge=1e-4, description="creates begun per second on average")]
    burst: Annotated[PositiveInt, Field(description="creates begun at once after a pause")] = 1


def _as_rate(value: Any) -> Any:
    """Return what a plain number stands for."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return {"per_second": value} if plain else value


class SandboxUse(Use):
    """A sandbox backend by name; the pool's keys beside the backend's own."""

    create_concurrency: Annotated[PositiveInt, Field(description="creates under way at once")] = 4
    create_retries: Annotated[
        int, Field(ge=0, description="further tries of a create that the backend calls retryable")
    ] = 8
    create_rate: Annotated[
        CreateRateUse | None,
        BeforeValidator(_as_rate),
        Field(
            description="how fast creates may begin, in all processes of this host that use the backend; "
            "a number is `per_second`; null: no limit"
        ),
    ] = None
    warm: Annotated[
        int, Field(ge=0, description="sandboxes created ahead (never reused), of all kinds together")
    ] = 0


class RouterHealth(_Section):
    """When an engine counts as ill."""

    interval: Annotated[PositiveFloat, Field(description="seconds between probes of each engine")] = 30.0
    down_after: Annotated[PositiveInt, Field(description="failed probes in a row that take it out")] = 3
    up_after: Annotated[PositiveInt, Field(description="good probes in a row that bring it back")] = 2


class RouterBreaker(_Section):
    """When an engine whose requests fail gets none, however healthy it says that it is."""

    faults: Annotated[
        PositiveInt,
        Field(description="faults of the server in a row that open it: no answer, 5xx but 503; never 4xx"),
    ] = 10
    seconds: Annotated[PositiveFloat, Field(description="how long it stays open; then one request tries")] = (
        30.0
    )


def _as_word(value: Any) -> Any:
    """Return the word that YAML 1.1 took for a boolean."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class RouterUse(Use):
    """Router policies by name, chained by `+`; core keys beside each policy's keys under its name."""

    dp_aware: Annotated[
        Literal["auto", "on", "off"],
        BeforeValidator(_as_word),
        Field(
            description="route to each data-parallel rank of an engine: auto: where it has several; on: each "
            "engine must have several; off: the engine chooses"
        ),
    ] = "auto"
    drain_on_update: Annotated[
        float,
        Field(
            ge=0,
            description="seconds that a weight update waits for replies under way to finish; 0: it does not",
        ),
    ] = 0.0
    load_interval: Annotated[
        PositiveFloat, Field(description="seconds after which engines are asked again how many requests wait")
    ] = 5.0
    health: Annotated[RouterHealth, Field(description="when an engine counts as ill")] = RouterHealth()
    breaker: Annotated[RouterBreaker, Field(description="circuit breaker of each worker")] = RouterBreaker()


class Need(_Section):
    """A recipe to run first."""

    recipe: Annotated[str, Field(description="name or path of the recipe")]
    overrides: Annotated[list[str], Field(description="its overrides, e.g. seed=${seed}")] = []


def _as_need(value: Any) -> Any:
    return {"recipe": value} if isinstance(value, str) else value


class TokenizerTraining(_Section):
    """A tokenizer to train before the run."""

    train: Annotated[
        str, Field(description="corpus: a JSONL file of `messages` or `text` rows, or pack:NAME/FILE")
    ]
    vocab_size: Annotated[PositiveInt, Field(description="tokens asked for; fewer when merges run out")] = 768


class ModelInit(_Section):
    """A fresh, seeded model."""

    architecture: Annotated[str, Field(description="a transformers model type, e.g. llama")]
    sizes: Annotated[dict[str, Any], Field(description="config fields of that model type")]
    std: Annotated[
        PositiveFloat | None,
        Field(description="standard deviation of the weights; default: 1/sqrt(hidden size)"),
    ] = None


class Model(_Section):
    """The policy: weights that exist, or fresh ones."""

    path: Annotated[str | None, Field(description="directory or name of pretrained weights")] = None
    init: Annotated[ModelInit | None, Field(description="make fresh weights instead of loading some")] = None
    tokenizer: Annotated[
        str | TokenizerTraining | None,
        Field(description="directory of one, or one to train; default: the model's"),
    ] = None
    chat_template: Annotated[
        str | None, Field(description="path of a Jinja template; default: the tokenizer's")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(description="variables for the chat template, such as enable_thinking")
    ] = Field(default_factory=dict)
    tool_parser: Annotated[
        str,
        Field(description="form of tool calls (docs/renderers.md); auto: as the chat template shows"),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Field(description="marks of reasoning, by name; auto: as the chat template shows; none: not parsed"),
    ] = "auto"
    context_length: Annotated[PositiveInt | None, Field(description="tokens; default: the model's")] = None


class Sampling(_Section):
    """How the policy samples."""

    temperature: Annotated[float, Field(ge=0, description="0 is greedy")] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, description="-1: all")] = -1


class Rollout(_Section):
    """How episodes are made and grouped."""

    max_concurrent: Annotated[PositiveInt, Field(description="episodes in flight")] = 64
    group_size: Annotated[
        PositiveInt, Field(description="episodes of one task that are normalised together")
    ] = 8
    batch_groups: Annotated[PositiveInt, Field(description="groups per training step")] = 8
    submission: Annotated[Literal["episode", "group"], Field(description="what a free slot takes")] = (
        "episode"
    )
    min_group: Annotated[
        int | None,
        Field(
            ge=2,
            description="episodes with which a group trains when the others failed or are too late; default: "
            "group_size, only whole groups",
        ),
    ] = None
    max_staleness: Annotated[
        int | None,
        Field(
            ge=0,
            description="optimizer steps that a trained token may lag; 0: no episode runs in training; null: "
            "no limit",
        ),
    ] = 0
    pause_mode: Annotated[
        Literal["in_place", "retract", "abort"],
        Field(
            description="what a weight update does to replies under way: in_place: they freeze and go on, on "
            "the cache of the old weights; retract: they are computed anew; abort: they are asked anew"
        ),
    ] = "in_place"
    buffer_groups: Annotated[
        PositiveInt | None,
        Field(
            description="groups are started only while fewer finished ones wait; default: twice batch_groups"
        ),
    ] = None
    unused: Annotated[
        Literal["recycle", "drop"],
        Field(
            description="groups that became stale or could not be filled: recycle: their prompts are made "
            "anew first; drop: they are rejected"
        ),
    ] = "recycle"
    fill: Annotated[
        bool,
        Field(description="rejected groups do not count: a step takes batch_groups groups that train"),
    ] = False
    adaptive_concurrency: Annotated[
        bool,
        Field(description="fewer episodes than max_concurrent while requests queue at the engines"),
    ] = False
    refill_limit: Annotated[int, Field(ge=0, description="replacements of failed episodes per group")] = 4
    drop_zero_variance: Annotated[
        bool, Field(description="groups whose rewards are all equal do not train")
    ] = True
    draw: Annotated[
        Literal["uniform", "learnable"],
        Field(description="how tasks are drawn; learnable: by p(1-p)+floor per family"),
    ] = "uniform"
    draw_floor: Annotated[float, Field(gt=0, le=1, description="floor of the learnable draw")] = 0.1
    workers: Annotated[
        PositiveInt, Field(description="processes that run episodes; 1: the driver's own, more: beside it")
    ] = 1
    sampling: Annotated[Sampling, Field(description="how training episodes are sampled")] = Sampling()
    permute_rewards: Annotated[
        bool, Field(description="control experiment: permute rewards within each batch")
    ] = False


class Outcomes(_Section):
    """What becomes of episodes that ended without verification."""

    timeout: Annotated[Literal["verify", "zero", "drop"], Field(description="the agent ran out of time")] = (
        "verify"
    )
    truncated: Annotated[
        Literal["verify", "zero", "drop"], Field(description="the agent ran out of tokens or turns")
    ] = "verify"


class Budgets(_Section):
    """Limits of an episode; seconds unless the name says otherwise."""

    turns: Annotated[PositiveInt, Field(description="turns of the agent")] = 30
    max_seq_len: Annotated[
        PositiveInt, Field(description="tokens of a session, prompt and replies together")
    ] = 32768
    reply_tokens: Annotated[PositiveInt, Field(description="tokens of one reply")] = 8192
    slack: Annotated[PositiveFloat, Field(description="seconds of lifetime beyond the sum of the nodes")] = (
        60.0
    )
    create: Annotated[PositiveFloat | None, Field(description="cap: create the sandboxes")] = None
    setup: Annotated[PositiveFloat | None, Field(description="cap: enter the episode")] = None
    agent: Annotated[PositiveFloat | None, Field(description="cap: the agent's own clock")] = None
    turn: Annotated[PositiveFloat | None, Field(description="cap: one turn")] = None
    command: Annotated[PositiveFloat | None, Field(description="cap: one command of the agent")] = None
    verify: Annotated[PositiveFloat | None, Field(description="cap: verification")] = None
    teardown: Annotated[PositiveFloat | None, Field(description="cap: close sandboxes")] = None
    episode: Annotated[
        PositiveFloat | None, Field(description="cap: the whole episode; default: the sum of its parts")
    ] = None
    lifetime: Annotated[
        PositiveFloat | None, Field(description="cap: a sandbox; default: episode and slack")
    ] = None


class Evaluation(_Section):
    """Held-out evaluation on the run's own engines."""

    every: Annotated[int, Field(ge=0, description="steps between evaluations; 0: none")] = 0
    split: Annotated[str, Field(description="split of the tasks")] = "heldout"
    episodes: Annotated[
        PositiveInt | None, Field(description="episodes per evaluation; default: each task once")
    ] = None
    samples: Annotated[PositiveInt, Field(description="episodes per task")] = 1
    greedy: Annotated[bool, Field(description="evaluate greedily as well")] = False
    first: Annotated[bool, Field(description="evaluate before the first step")] = True


class Checkpoint(_Section):
    """When a step commits."""

    every: Annotated[PositiveInt, Field(description="steps between checkpoints")] = 1
    keep: Annotated[PositiveInt, Field(description="newest checkpoints to keep")] = 2
    load_from: Annotated[
        str | None,
        Field(
            description="weights to start from: a checkpoint's directory, or a run (its id or directory), "
            "which means its newest checkpoint"
        ),
    ] = None


class Storage(_Section):
    """Where runs are."""

    root: Annotated[str, Field(description="directory of run directories")] = "./runs"


class Gateway(_Section):
    """The HTTP face of sessions, for clients outside the process."""

    bind: Annotated[str, Field(description="address; not loopback needs a token")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port; 0: any that is free")] = 0
    public_url: Annotated[
        str | None,
        Field(
            pattern=r"^https?://",
            description="how sandboxes elsewhere reach it; {host} in it is the node's address, {port} the "
            "port that it listens on",
        ),
    ] = None
    token: Annotated[
        Secret | None, Field(description="secret that clients must show: env:NAME or file:PATH")
    ] = None
    matcher: Annotated[
        Literal["strict", "thin"],
        Field(
            description="whether agents pass replies back whole (strict) or may leave their reasoning out "
            "(thin), whose tokens are kept all the same"
        ),
    ] = "strict"
    idle_ttl: Annotated[
        PositiveFloat | None,
        Field(description="seconds without a request after which a session opened over HTTP is closed"),
    ] = 3600.0


class Recipe(_Section):
    """A resolved recipe: core keys validated, components by name."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[a-z]([a-z0-9._-]{0,38}[a-z0-9])?$",
            description="name of the recipe; run ids start with it",
        ),
    ]
    needs: Annotated[
        dict[str, Annotated[Need, BeforeValidator(_as_need)]],
        Field(description="recipes to run first: alias -> recipe, or {recipe, overrides}"),
    ] = {}
    model: Annotated[Model | None, Field(description="the policy")] = None
    environment: Annotated[list[EnvironmentUse], Field(description="one environment or a list")] = []
    agent: Annotated[Use | None, Field(description="agent component")] = None
    sandbox: Annotated[SandboxUse | None, Field(description="sandbox backend component")] = None
    router: Annotated[
        RouterUse, Field(description="router policies, chained by +; each policy's keys under its name")
    ] = RouterUse(use="min_load")
    budgets: Annotated[Budgets, Field(description="limits of an episode")] = Budgets()
    engine: Annotated[Use | None, Field(description="engine component")] = None
    rollout: Annotated[Rollout, Field(description="how episodes are made")] = Rollout()
    outcomes: Annotated[Outcomes, Field(description="which outcomes train, as what")] = Outcomes()
    evaluation: Annotated[Evaluation, Field(description="held-out evaluation")] = Evaluation()
    checkpoint: Annotated[Checkpoint, Field(description="when a step commits")] = Checkpoint()
    storage: Annotated[Storage, Field(description="where runs are")] = Storage()
    gateway: Annotated[Gateway, Field(description="HTTP face of sessions")] = Gateway()
    trainer: Annotated[Use | None, Field(description="trainer component")] = None
    launcher: Annotated[Use, Field(description="launcher component")] = Use(use="local")
    trackers: Annotated[list[Use], Field(description="tracker components")] = []
    plugins: Annotated[list[str], Field(description="observer plugins to load")] = []
    seed: Annotated[int, Field(ge=0, description="the one seed; others are derived from it")] = 0
    steps: Annotated[PositiveInt, Field(description="training steps")] = 100
