"""The engine interface and the client of its wire protocol (SGLang's)."""

from rollhook.engine.base import Engine, Generation, GenerationRequest, Placement, SamplingParams

__all__ = ["Engine", "Generation", "GenerationRequest", "Placement", "SamplingParams"]
