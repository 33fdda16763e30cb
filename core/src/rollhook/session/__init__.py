"""Sessions: conversations with the policy, token-exact on engines of ours, over messages elsewhere."""

from rollhook.session.common import SessionClosedError, SessionError, SessionExistsError, TurnConflictError
from rollhook.session.face import Policy, PolicySession
from rollhook.session.message_policy import MessagePolicy
from rollhook.session.message_session import MessageSession
from rollhook.session.policy import PolicyClient
from rollhook.session.render import Renderer, RenderError
from rollhook.session.session import Session
from rollhook.session.tree import Leaf
from rollhook.session.turn import Clock, Limits

__all__ = [
    "Clock",
    "Leaf",
    "Limits",
    "MessagePolicy",
    "MessageSession",
    "Policy",
    "PolicyClient",
    "PolicySession",
    "RenderError",
    "Renderer",
    "Session",
    "SessionClosedError",
    "SessionError",
    "SessionExistsError",
    "TurnConflictError",
]
