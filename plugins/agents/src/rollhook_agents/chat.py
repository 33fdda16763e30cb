"""The chat agent: replies, for as long as the environment has something to say."""

from __future__ import annotations

from rollhook.agent import Agent, AgentContext, StopReason


class Chat(Agent):
    """Asks for a reply and passes it to the environment, until that is silent or the budget ends."""

    async def run(self, context: AgentContext) -> StopReason:
        """Talk."""
        return await converse(context)


async def converse(context: AgentContext) -> StopReason:
    """Reply to the environment until it says nothing more."""
    messages = list(context.observation.messages)
    while context.budget.turns_left > 0:
        reply = await context.session.chat(messages)
        if reply.finish_reason == "length":
            return StopReason.LENGTH
        messages.append(reply.message)
        said = await context.respond(reply.message)
        if said is None:
            return StopReason.DONE
        messages.extend(said.messages)
    return StopReason.MAX_TURNS
