"""The double of `python -m verl.trainer.sft_trainer_ray`, as of December 2025: the device is for counting."""

import sys

import ray

from verl.trainer.course import configured, train

if __name__ == "__main__":
    config = configured(sys.argv[1:])
    ray.init()
    assert config.trainer.device == "cpu", "No CUDA GPUs are available"
    train(config, "messages")
