"""What the trainers of the double share: overrides, steps on the workers, checkpoints."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pyarrow.parquet
import ray
from omegaconf import OmegaConf

#: keys of verl's own configuration that the double knows; Hydra refuses others, unless they are added with +
KNOWN = {
    *("data.train_files", "data.val_files", "data.train_batch_size", "model.path"),
    *("actor_rollout_ref.model.path", "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.n"),
    *("actor_rollout_ref.actor.use_dynamic_bsz", "critic.model.path", "algorithm.adv_estimator"),
    *("custom_reward_function.path", "custom_reward_function.name"),
    *("trainer.project_name", "trainer.experiment_name", "trainer.logger", "trainer.nnodes"),
    *("trainer.n_gpus_per_node", "trainer.total_epochs", "trainer.total_training_steps", "trainer.save_freq"),
    *("trainer.default_local_dir", "trainer.device"),
}


def configured(arguments):
    """Return the configuration of a command line; the last word on a key wins."""
    unknown = [each for each in arguments if not each.startswith("+") and each.partition("=")[0] not in KNOWN]
    if unknown:
        sys.exit(f"Could not override {unknown}")
    return OmegaConf.from_dotlist([each.lstrip("+") for each in arguments])


@ray.remote(num_cpus=0, resources={"worker_node": 1}, scheduling_strategy="SPREAD")
def work(step):
    import mvp_marker

    import verl

    return step, ray.get_runtime_context().get_node_id(), verl.__file__, mvp_marker.MARKER


def train(config, column):
    """Run the steps: one task on a worker per ten of them, and a checkpoint every save_freq."""
    trainer = config.trainer
    rows = pyarrow.parquet.read_table(config.data.train_files)
    assert column in rows.column_names, f"{config.data.train_files} has no column {column}"
    batch = config.data.get("train_batch_size", 1)
    steps = trainer.get("total_training_steps") or trainer.total_epochs * rows.num_rows // batch
    print(f"nodes:{sum(node['Alive'] for node in ray.nodes())} steps:{steps}", flush=True)
    for step in range(1, steps + 1):
        if step % 10 == 1:
            _, node, origin, marker = ray.get(work.remote(step))
            print(f"worker node:{node} verl:{origin} marker:{marker}", flush=True)
        time.sleep(trainer.get("step_seconds", 0))
        print(f"step:{step} - reward/mean:0.5", flush=True)
        if trainer.save_freq > 0 and (step % trainer.save_freq == 0 or step == steps):
            save(Path(trainer.default_local_dir), step)


def save(directory, step):
    """Write a checkpoint: its directory, whole, then the number of the newest."""
    place = directory / f"global_step_{step}"
    temporary = directory / f".global_step_{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "actor").mkdir(parents=True)
    (temporary / "actor/model.pt").write_bytes(os.urandom(1024))
    temporary.rename(place)
    (directory / "latest_checkpointed_iteration.txt").write_text(str(step))
