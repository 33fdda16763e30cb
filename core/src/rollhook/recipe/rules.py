"""What must hold between the parts of a recipe, whatever the machine. Each rule yields problems."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator

from rollhook.recipe.composition import Composition, asks_from, idle, use_name
from rollhook.recipe.launch_rules import addresses, code, hosted, launcher
from rollhook.recipe.problem import Problem


def check_rules(composition: Composition) -> list[Problem]:
    """Apply every rule."""
    return [problem for rule in _RULES for problem in rule(composition)]


def missing_parts(c: Composition) -> Iterator[Problem]:
    """Parts that others need."""
    r = c.recipe
    if c.trains and r.model is None and not c.has_weights:
        yield Problem(
            "model",
            "is missing: a trainer needs a policy",
            hint="set model.path, or model.init for a fresh one",
        )
    if c.evaluating and r.engine is not None and not c.asks_endpoint and not c.has_weights:
        yield Problem(
            "model.path",
            "is missing: an evaluation makes no weights",
            hint="set it, or give --checkpoint, a directory or the id of a run",
        )
    if c.evaluating and not r.environment:
        yield Problem("environment", "is missing: there is nothing to evaluate on")
    elif r.trainer is None and not r.environment:
        yield Problem("trainer", "is missing, and so is environment: this recipe does nothing")
    if c.trains_on_episodes and not r.environment:
        yield Problem("environment", f"is missing: trainer {use_name(r.trainer)} trains on episodes")
    if r.environment and r.agent is None and c.rolls_out:
        yield Problem("agent", "is missing: an environment needs an agent", hint="for example agent: shell")
    agent = c.part("agent")
    if agent and agent.cls and agent.cls.needs_policy and r.engine is None and c.rolls_out:
        yield Problem("engine", f"is missing: agent {agent.name} asks a policy")
    if agent and agent.cls and agent.cls.needs_sandbox and r.sandbox is None and c.rolls_out:
        yield Problem(
            "sandbox", f"is missing: agent {agent.name} works in one", hint="for example sandbox: local"
        )


def no_effect(c: Composition) -> Iterator[Problem]:
    """Keys that nothing reads under the chosen parts.

    A key counts only if it was not given before the choice: what a shipped recipe says may be switched
    off by an override. A lock says everything, so nothing counts there.
    """
    r = c.recipe
    if c.loaded.locked is not None:
        return
    if c.trains and not c.trains_on_episodes:
        keys = ["group_size", "batch_groups", "submission", "refill_limit", "drop_zero_variance"]
        keys += ["draw", "draw_floor", "permute_rewards", "max_staleness", "buffer_groups", "min_group"]
        keys += ["unused", "fill", "adaptive_concurrency"]
        keys += ["pause_mode"]
        keys = [f"rollout.{key}" for key in keys] + ["outcomes"]
        if r.evaluation.every:
            keys += ["evaluation.every"]
        chosen = c.layer("trainer")
        yield from idle(c, keys, chosen, f"trainer {use_name(r.trainer)} brings its own data")
        rest = ["environment", "agent", "sandbox", "router", "engine", "budgets"]
        rest += ["rollout.max_concurrent", "rollout.workers", "rollout.sampling"]
        yield from idle(c, rest, chosen, "no episode is run")
    if not c.trains and not c.evaluating:
        keys = ["steps", "checkpoint.every", "checkpoint.keep", "rollout.permute_rewards", "evaluation.every"]
        yield from idle(c, keys, c.layer("trainer"), "there is no trainer")
    if c.asks_endpoint and not c.trains:
        keys = ["router", "model.path", "model.init", "model.tokenizer", "model.chat_template"]
        keys += ["model.chat_template_kwargs", "model.tool_parser", "model.reasoning_parser"]
        keys += ["gateway.matcher"]
        reason = f"engine {use_name(r.engine)} asks an endpoint, which renders and routes by itself"
        yield from idle(c, keys, c.layer("engine"), reason)
    if r.rollout.draw == "uniform":
        yield from idle(c, ["rollout.draw_floor"], c.layer("rollout.draw"), "rollout.draw is uniform")
    if c.trains and not r.evaluation.every:
        keys = [f"evaluation.{key}" for key in ("split", "episodes", "samples", "greedy", "first")]
        yield from idle(c, keys, c.layer("evaluation.every"), "evaluation.every is 0")
    if r.rollout.max_staleness == 0:
        reason = "with rollout.max_staleness 0 no group is made beyond the next batch"
        yield from idle(c, ["rollout.buffer_groups"], c.layer("rollout.max_staleness"), reason)
    if asks_from(c) != "sandbox":
        yield from idle(c, ["gateway.public_url"], -1, "no agent asks the policy from within a sandbox")
    if r.checkpoint.load_from is not None:
        chosen = c.layer("checkpoint.load_from")
        yield from idle(
            c, ["model.path", "model.init"], chosen, "checkpoint.load_from says where weights are"
        )
    if len(r.environment) == 1:
        yield from idle(c, ["environment.weight"], -1, "there is one environment")
    agent = c.part("agent")
    if agent and agent.cls and not agent.cls.needs_policy and not c.trains:
        yield from idle(c, ["engine", "router"], c.layer("agent"), f"agent {agent.name} asks no policy")


def training(c: Composition) -> Iterator[Problem]:
    """What may not train."""
    if not c.trains_on_episodes:
        return
    r = c.recipe
    agent, engine = c.part("agent"), c.part("engine")
    if engine and engine.cls and not engine.cls.gives_tokens:
        yield Problem(
            "engine.use",
            f"{engine.name} gives no token ids and log-probabilities, so nothing can be trained on it",
        )
    if agent and agent.cls and agent.cls.needs_solution:
        yield Problem("agent.use", f"{agent.name} uses the reference solution, so it may not train")
    elif agent and agent.cls and not agent.cls.needs_policy:
        yield Problem("agent.use", f"{agent.name} asks no policy, so there is nothing to train on")
    if r.rollout.group_size == 1 and r.rollout.drop_zero_variance:
        yield Problem(
            "rollout.group_size",
            "1 leaves every group without variance, and rollout.drop_zero_variance drops these",
        )
    elif r.rollout.sampling.temperature == 0 and r.rollout.group_size > 1:
        yield Problem(
            "rollout.sampling.temperature", "0 makes all episodes of a group alike, so nothing is learnt"
        )


def numbers(c: Composition) -> Iterator[Problem]:
    """Sizes that do not fit together."""
    rollout = c.recipe.rollout
    if rollout.workers > rollout.max_concurrent:
        yield Problem(
            "rollout.workers",
            f"{rollout.workers} is more than rollout.max_concurrent, {rollout.max_concurrent} episodes, "
            "so some would never have one",
        )
    if rollout.submission == "group" and rollout.max_concurrent < rollout.group_size:
        yield Problem(
            "rollout.max_concurrent",
            f"{rollout.max_concurrent} is less than rollout.group_size, {rollout.group_size}: "
            "with submission group nothing could start",
        )
    if rollout.buffer_groups is not None and rollout.buffer_groups < rollout.batch_groups:
        yield Problem(
            "rollout.buffer_groups",
            f"{rollout.buffer_groups} is less than rollout.batch_groups, {rollout.batch_groups}: "
            "no batch would ever be complete",
        )
    if rollout.min_group is not None and rollout.min_group > rollout.group_size:
        yield Problem(
            "rollout.min_group",
            f"{rollout.min_group} is more than rollout.group_size, {rollout.group_size}: nothing would train",
        )
    if rollout.fill and rollout.permute_rewards:
        yield Problem(
            "rollout.fill",
            "has no meaning with rollout.permute_rewards, which decides on groups once a step has them all",
        )
    sandbox = c.recipe.sandbox
    if sandbox and rollout.workers > sandbox.create_concurrency:
        yield Problem(
            "rollout.workers",
            f"{rollout.workers} is more than sandbox.create_concurrency, {sandbox.create_concurrency}, which "
            "they share",
            hint=f"set sandbox.create_concurrency={rollout.workers}",
        )
    if sandbox and sandbox.warm > rollout.max_concurrent:
        yield Problem(
            "sandbox.warm",
            f"{sandbox.warm} is more than the {rollout.max_concurrent} episodes of rollout.max_concurrent, "
            "so some are never used",
        )


def budgets(c: Composition) -> Iterator[Problem]:
    """A child's limit is at most its parent's; the lifetime reserves every child and the slack."""
    b = c.recipe.budgets
    tree = [
        ("create", "episode"),
        ("setup", "episode"),
        ("agent", "episode"),
        ("verify", "episode"),
        ("teardown", "episode"),
    ]
    tree += [("turn", "agent"), ("command", "turn"), ("episode", "lifetime")]
    if b.turn is None:
        tree.append(("command", "agent"))
    for child, parent in tree:
        low, high = getattr(b, child), getattr(b, parent)
        if low is not None and high is not None and low > high:
            yield Problem(
                f"budgets.{child}",
                f"{low:g} s is more than budgets.{parent}, {high:g} s",
                allowed="a part's limit is at most that of the whole",
            )
    nodes = [(node, getattr(b, node)) for node in ("create", "setup", "agent", "verify", "teardown")]
    said = [(node, value) for node, value in nodes if value is not None]
    least = sum(value for _, value in said) + b.slack
    if b.lifetime is not None and b.lifetime < least:
        terms = " + ".join([*(node for node, _ in said), "slack"])
        yield Problem("budgets.lifetime", f"{b.lifetime:g} s is less than {terms}, {least:g} s")
    if b.reply_tokens > b.max_seq_len:
        key = "budgets.reply_tokens" if c.says("budgets.reply_tokens") else "budgets.max_seq_len"
        yield Problem(
            key,
            f"one reply may have {b.reply_tokens} tokens, a whole session only {b.max_seq_len}",
            hint="lower budgets.reply_tokens or raise budgets.max_seq_len",
        )
    engine = c.part("engine")
    for whose, length in (
        ("model", c.recipe.model.context_length if c.recipe.model else None),
        ("engine", getattr(engine.config, "context_length", None) if engine else None),
    ):
        if length is not None and b.max_seq_len > length:
            key = "budgets.max_seq_len" if c.says("budgets.max_seq_len") else f"{whose}.context_length"
            yield Problem(
                key,
                f"a session may have {b.max_seq_len} tokens, the {whose}'s context only {length}",
                hint="lower budgets.max_seq_len",
            )


def model(c: Composition) -> Iterator[Problem]:
    """Where the weights come from."""
    m = c.recipe.model
    if m is None or (c.evaluating and not c.has_weights):
        return  # `missing_parts` says it
    load_from = c.recipe.checkpoint.load_from
    if m.path is not None and m.init is not None:
        yield Problem(
            "model.init",
            "cannot be given beside model.path: weights are loaded or made",
            hint="delete one: ~model.init or ~model.path",
        )
    elif m.path is None and m.init is None and load_from is None and not c.asks_endpoint:
        yield Problem("model", "says neither where weights are (path) nor how to make them (init)")
    trainer = c.part("trainer")
    if m.init is not None and m.path is None and trainer and trainer.cls and not trainer.cls.can_initialise:
        yield Problem(
            "model.init", f"trainer {trainer.name} cannot make fresh weights", hint="set model.path"
        )
    if m.init is not None and m.tokenizer is None and load_from is None:
        yield Problem(
            "model.tokenizer",
            "is missing: fresh weights have no tokenizer",
            allowed="a directory, or {train: CORPUS}",
        )
    if m.path is not None and m.tokenizer is not None and not isinstance(m.tokenizer, str):
        yield Problem(
            "model.tokenizer",
            "cannot be trained for weights that exist: they have theirs",
            hint="delete it: ~model.tokenizer",
        )


def parsers(c: Composition) -> Iterator[Problem]:
    """How replies are parsed."""
    m = c.recipe.model
    if m is None or (m.tool_parser == "auto" and m.reasoning_parser == "auto"):
        return
    from rollhook.reply.forms import FORM_NAMES, THINKING_NAMES

    for key, name, names in (
        ("tool_parser", m.tool_parser, FORM_NAMES),
        ("reasoning_parser", m.reasoning_parser, THINKING_NAMES),
    ):
        if name not in names:
            yield Problem(f"model.{key}", f"{name!r} is unknown", allowed=", ".join(names))


def gateway(c: Composition) -> Iterator[Problem]:
    """Who may reach the sessions."""
    bind, key = c.recipe.gateway.bind, "gateway.bind"
    try:
        loopback = bind == "localhost" or ipaddress.ip_address(bind).is_loopback
    except ValueError:
        yield Problem(
            key,
            f"{bind!r} is not an IP address",
            allowed="for example 127.0.0.1, or 0.0.0.0 for all interfaces",
        )
        return
    if not loopback and c.recipe.gateway.token is None:
        yield Problem(
            key,
            f"{bind} can be reached from elsewhere, so gateway.token is needed",
            hint="set gateway.token=env:NAME",
        )


def outside(c: Composition) -> Iterator[Problem]:
    """How an agent's program reaches the sessions from where it is."""
    settings, workers = c.recipe.gateway, c.recipe.rollout.workers
    # one that wraps another is where the other is
    elsewhere = any(part.cls is not None and part.cls.elsewhere for part in c.parts.of("sandbox"))
    if asks_from(c) == "sandbox" and elsewhere and settings.public_url is None:
        yield Problem(
            "gateway.public_url",
            f"is missing: agent {use_name(c.recipe.agent)} asks the policy from sandboxes of "
            f"{use_name(c.recipe.sandbox)}, which are elsewhere",
            hint="set it to an address at which they reach gateway.bind and gateway.port",
        )
    if settings.port and workers > 1:
        yield Problem(
            "gateway.port",
            f"{settings.port} cannot be that of all {workers} of rollout.workers",
            hint="leave it 0, and put {port} into gateway.public_url",
        )
    from_sandbox = asks_from(c) == "sandbox"
    if from_sandbox and settings.public_url and "{port}" not in settings.public_url and not settings.port:
        yield Problem(
            "gateway.public_url",
            "does not say which port is meant, and gateway.port is any that is free",
            hint="set gateway.port, or put {port} into the address",
        )


def lists(c: Composition) -> Iterator[Problem]:
    """Names given twice in a list."""
    for key, names in (
        ("trackers", [each.use for each in c.recipe.trackers]),
        ("plugins", list(c.recipe.plugins)),
        ("router.use", c.recipe.router.use.split("+")),
    ):
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield Problem(key, f"names {name!r} twice")


def router_chain(c: Composition) -> Iterator[Problem]:
    """Policies that are never asked."""
    names = list(dict.fromkeys(each.strip() for each in c.recipe.router.use.split("+")))
    always = {part.name for part in c.parts.of("router") if part.cls and part.cls.always_picks}
    decides = next((name for name in names if name in always), None)
    if decides is not None and (idle := names[names.index(decides) + 1 :]):
        way_out = "+".join([*(name for name in names if name not in always), decides])
        yield Problem(
            "router.use",
            f"{decides} always picks a worker, so {' and '.join(idle)} after it never decides",
            hint=f"set router.use={way_out}",
        )


def sandbox_isolation(c: Composition) -> Iterator[Problem]:
    """Trained episodes are isolated from the host."""
    part = c.part("sandbox")
    if part is None or part.config is None or not c.trains_on_episodes:
        return
    backend = c.parts.build(part)
    if backend is None or isinstance(backend, Problem):
        return
    if backend.unsafe or "isolation" not in backend.capabilities:
        reason = f"{part.name} as it is set does not isolate episodes from this machine, so it may not train"
        yield Problem("sandbox.use", reason)


_RULES: list[Callable[[Composition], Iterator[Problem]]] = [
    missing_parts,
    no_effect,
    training,
    numbers,
    budgets,
    model,
    parsers,
    gateway,
    outside,
    launcher,
    code,
    hosted,
    addresses,
    lists,
    router_chain,
    sandbox_isolation,
]
