"""Agents that ask no policy: the reference solution, and nothing at all."""

from __future__ import annotations

from rollhook.agent import Agent, AgentContext, StopReason
from rollhook.errors import Unsupported


class Oracle(Agent):
    """Applies the task's reference solution; for proving tasks, never for training."""

    needs_solution = True
    needs_policy = False

    async def run(self, context: AgentContext) -> StopReason:
        """Solve the phase; Unsupported when the runtime offers no solution (any run but an oracle run)."""
        if context.solve is None:
            raise Unsupported("agent oracle runs only where reference solutions may be used (`tasks oracle`)")
        await context.solve()
        return StopReason.DONE


class Nop(Agent):
    """Stops at once."""

    needs_policy = False

    async def run(self, context: AgentContext) -> StopReason:
        """Do nothing."""
        return StopReason.DONE
