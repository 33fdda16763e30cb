"""A real OpenEnv server, of the openenv package: guess a number; and what can go wrong."""

import os
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """Say a number."""

    number: int


class Told(Observation):
    text: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret = (seed or 0) % 10
        self.kind = kwargs.get("kind", "")
        self.steps = 0
        if self.kind == "refused":
            raise ValueError("no such kind")
        return Told(text="Guess my number between 0 and 9.")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        if self.kind == "die":
            os._exit(3)
        if self.kind == "broken":
            raise RuntimeError("the environment is broken")
        right = action.number == self.secret
        text = "right" if right else "higher" if action.number < self.secret else "lower"
        reward = None if self.kind == "unrewarded" else float(right)
        return Told(text=text, done=right or self.steps >= 3, reward=reward)

    @property
    def state(self):
        return State(step_count=getattr(self, "steps", 0))


if __name__ == "__main__":
    sessions = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    app = create_fastapi_app(GuessEnvironment, Guess, Told, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
