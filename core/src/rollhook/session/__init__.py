"""Sessions: token-exact conversations with the policy, routed to engine workers."""

from rollhook.session.common import SessionClosedError, SessionError, SessionExistsError, TurnConflictError
from rollhook.session.policy import PolicyClient
from rollhook.session.render import Renderer, RenderError
from rollhook.session.session import Session
from rollhook.session.tree import Leaf
from rollhook.session.turn import Clock, Limits

__all__ = [
    "Clock",
    "Leaf",
    "Limits",
    "PolicyClient",
    "RenderError",
    "Renderer",
    "Session",
    "SessionClosedError",
    "SessionError",
    "SessionExistsError",
    "TurnConflictError",
]
