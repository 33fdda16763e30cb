"""A transformers engine and a GRPO and SFT trainer in torch."""
