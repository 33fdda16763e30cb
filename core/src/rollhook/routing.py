"""The chain of router policies that a recipe writes as `sticky+min_load`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollhook.component import BuildContext
from rollhook.errors import UsageError
from rollhook.router import RouteRequest, RouterPolicy, Worker, WorkerLoad


class PolicyBuilder(Protocol):
    """The one method of the loader that a chain needs."""

    def build(
        self, kind: str, name: str, keys: dict[str, Any], context: BuildContext, key_path: str = ""
    ) -> Any:
        """Build a component; `key_path` is how errors name where its keys stand."""


class Chain:
    """Asks its policies in order; the first that answers decides, and all of them learn of it."""

    def __init__(self, policies: Sequence[RouterPolicy]) -> None:
        if not policies:
            raise UsageError("a router needs at least one policy")
        self.policies = tuple(policies)
        self._known: tuple[Worker, ...] = ()

    @property
    def needs_prefix(self) -> bool:
        """Whether a policy looks at the prompt's tokens."""
        return any(policy.needs_prefix for policy in self.policies)

    @property
    def each_turn(self) -> bool:
        """Whether a policy wants to be asked now for sessions that have a worker."""
        return any(policy.each_turn for policy in self.policies)

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return a worker out of those on offer, or None when there is none.

        Where no policy decides it is the one with the fewest open sessions, then tokens in flight. Raises
        UsageError when a policy picks a worker that is not on offer: that is a fault of the policy, never a
        reason to use the worker.
        """
        if not workers:
            return None
        for policy in self.policies:
            worker = policy.pick(request, workers)
            if worker is None:
                continue
            if all(load.worker != worker for load in workers):
                raise UsageError(
                    f"router policy {type(policy).__name__} picked {worker}, which is not on offer"
                )
            return worker
        return min(workers, key=lambda load: (load.open_sessions, load.tokens_in_flight)).worker

    def assigned(self, request: RouteRequest, worker: Worker) -> None:
        """Tell every policy what was decided."""
        for policy in self.policies:
            policy.assigned(request, worker)

    def closed(self, session_id: str) -> None:
        """Tell every policy that a session has ended."""
        for policy in self.policies:
            policy.closed(session_id)

    def workers_changed(self, workers: Sequence[Worker]) -> None:
        """Tell every policy which workers exist now, if that has changed."""
        if tuple(workers) != self._known:
            self._known = tuple(workers)
            for policy in self.policies:
                policy.workers_changed(self._known)


def chain_names(use: str) -> list[str]:
    """Return the policy names of a router's `use`; UsageError for an empty or repeated one."""
    names = [name.strip() for name in use.split("+")]
    if not all(names):
        raise UsageError(f"router.use: {use!r} has an empty name; write policies like 'sticky+min_load'")
    if len(set(names)) < len(names):
        raise UsageError(f"router.use: {use!r} names a policy twice")
    return names


def build_chain(use: str, keys: Mapping[str, Any], plugins: PolicyBuilder, context: BuildContext) -> Chain:
    """Build the chain of a router's `use`; `keys` holds each policy's keys under its name.

    Raises UsageError for keys under a name that is not in the chain.
    """
    names = chain_names(use)
    strays = sorted(set(keys) - set(names))
    if strays:
        raise UsageError(f"router.{strays[0]}: no such policy in {use!r}; keys go under a policy's name")
    return Chain(
        [
            plugins.build("router", name, dict(keys.get(name) or {}), context, f"router.{name}")
            for name in names
        ]
    )
