"""The double of `python -m verl.trainer.main_ppo`."""

import sys

import ray

from verl.trainer.course import configured, train

if __name__ == "__main__":
    config = configured(sys.argv[1:])
    # verl gives its own runtime environment, without what the driver's environment has already
    ray.init(runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "true"}})
    print(f"adv_estimator:{config.algorithm.adv_estimator}", flush=True)
    train(config, "prompt")
