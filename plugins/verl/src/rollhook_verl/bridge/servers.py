"""verl's LLM servers as what our sessions ask tokens of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollhook.engine.base import Generation, GenerationRequest, PauseMode
from rollhook.engine.server_info import RankLoad
from rollhook.engine.streaming import TokenSink
from rollhook.errors import EngineError, Unsupported
from rollhook.router import Worker

#: a request ends when its stop token comes; verl's clients count their own retries of what was aborted
_ABORTED = ("aborted", "abort")


class Servers:
    """Asks verl's client (`LLMServerClient.generate`, verl 0.9.1), which balances its servers itself.

    Weights are verl's business: there is one version for us, and nothing here is paused or updated.
    """

    def __init__(self, client: Any, vocab_size: int | None) -> None:
        self._client = client
        self._vocab_size = vocab_size

    async def generate(
        self, worker: Worker, request: GenerationRequest, on_tokens: TokenSink | None = None
    ) -> Generation:
        """Generate one completion: ids and log-probabilities as the server emitted them."""
        sampling = request.sampling
        asked: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": True,
        }
        try:
            output = await self._client.generate(
                request_id=request.rid.rpartition("-")[0],  # the session's: verl keeps it on one server
                prompt_ids=list(request.input_ids),
                sampling_params=asked,
            )
        except Exception as error:  # whatever verl or Ray raises, another try may mend it
            raise EngineError(f"verl's servers gave no answer: {error}", kind="retryable") from error
        return self._generation(request, output, on_tokens)

    def _generation(self, request: GenerationRequest, output: Any, on_tokens: TokenSink | None) -> Generation:
        ids, logprobs = list(output.token_ids), list(output.log_probs or ())
        wrong = ""
        if len(ids) != len(logprobs):
            wrong = f"{len(ids)} tokens and {len(logprobs)} log-probabilities"
        elif self._vocab_size is not None and max(ids, default=0) >= self._vocab_size:
            wrong = f"token {max(ids)} where the model has {self._vocab_size}"
        if wrong:  # `user`: asking again would give the same
            raise EngineError(f"verl's servers gave {wrong}", kind="user")
        if output.stop_reason in _ABORTED:
            reason = "abort"
        else:
            reason = "stop" if ids and ids[-1] in request.sampling.stop_token_ids else "length"
        if on_tokens is not None:
            on_tokens(ids)
        return Generation(token_ids=ids, logprobs=logprobs, finish_reason=reason, weight_version=0)

    async def health(self, worker: Worker) -> bool:
        """Say yes: verl watches its servers."""
        return True

    async def weight_version(self, worker: Worker) -> int:
        """Return the one version there is for us."""
        return 0

    async def load(self, worker: Worker) -> Sequence[RankLoad]:
        """Say nothing: verl balances."""
        return ()

    async def abort(self, worker: Worker, rid: str | None = None) -> None:
        """Let it end: the cancelled call is given up."""

    async def flush(self, worker: Worker, tries: int = 1) -> None:
        """Not ours to do."""
        raise _not_ours("flushed")

    async def pause(self, worker: Worker, mode: PauseMode = "in_place") -> None:
        """Not ours to do."""
        raise _not_ours("paused")

    async def continue_(self, worker: Worker) -> None:
        """Not ours to do."""
        raise _not_ours("continued")

    async def update_weights_from_disk(self, worker: Worker, path: Path, version: int) -> None:
        """Not ours to do."""
        raise _not_ours("given weights")


def _not_ours(what: str) -> Unsupported:
    return Unsupported(f"verl's servers are {what} by verl")
