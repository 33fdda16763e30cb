"""The overrides of verl's Hydra configuration (0.9.1) that a recipe becomes, extra ones last."""

from __future__ import annotations

from collections.abc import Sequence

from rollhook.recipe.schema import Recipe
from rollhook.trainer import Place
from rollhook_verl.config import VerlConfig

MAIN, SFT = "verl.trainer.main_ppo", "verl.trainer.sft_trainer_ray"
#: delivered beside the script: which class runs an episode
LOOP_FILE, LOOP = "verl_agent_loop.yaml", "rollhook"
#: written on the node, below the job's directory
TRAIN_DATA, EVAL_DATA = "data/train.parquet", "data/eval.parquet"
#: environment of every worker: our bridge finds the job by it
JOB_VARIABLES = ("ROLLHOOK_RUN_ID", "ROLLHOOK_ATTEMPT", "ROLLHOOK_JOB_DIR", "ROLLHOOK_JOB_FILES")
#: option of an SGLang server -> key below actor_rollout_ref.rollout; others go to engine_kwargs.sglang
_ROLLOUT = {
    "--tp-size": "tensor_model_parallel_size",
    "--ep-size": "expert_parallel_size",
    "--pp-size": "pipeline_model_parallel_size",
    "--mem-fraction-static": "gpu_memory_utilization",
    "--max-running-requests": "max_num_seqs",
    "--dtype": "dtype",
}
_LEFT = {"--context-length"}  # max_model_len says it


def main_ppo(recipe: Recipe, config: VerlConfig, engine: Sequence[str], place: Place) -> list[str]:
    """Return the overrides of `main_ppo`."""
    assert recipe.model is not None
    r, b, e = recipe.rollout, recipe.budgets, recipe.evaluation
    found = [f"algorithm.adv_estimator={'grpo' if config.algorithm == 'grpo' else 'gae'}"]
    found += [f"data.train_files=$ROLLHOOK_JOB_DIR/{TRAIN_DATA}"]
    found += [f"data.val_files=$ROLLHOOK_JOB_DIR/{EVAL_DATA if e.every else TRAIN_DATA}"]
    found += [f"data.train_batch_size={r.batch_groups}", f"data.max_prompt_length={config.prompt_tokens}"]
    found += [f"data.max_response_length={b.max_seq_len}", f"data.seed={recipe.seed}"]
    found += _actor(recipe, config)
    found += _rollout(recipe, engine)
    if config.algorithm == "ppo":
        found += [f"critic.model.path={recipe.model.path}", f"critic.optim.lr={config.critic_lr:g}"]
        found += ["critic.ppo_mini_batch_size=${actor_rollout_ref.actor.ppo_mini_batch_size}"]
    # a failed episode raises: its group is replaced, and it never trains
    found += ["trainer.use_v1=true", "trainer.v1.trainer_mode=sync"]
    found += ["trainer.v1.sampler.sync_refill_failed_groups=true"]
    found += [f"algorithm.filter_groups.enable={_bool(r.drop_zero_variance)}"]
    found += [f"trainer.val_before_train={_bool(bool(e.every) and e.first)}"]
    found += [f"trainer.test_freq={e.every or -1}"]
    found += _trainer(recipe, place)
    found += [f'+ray_kwargs.ray_init.runtime_env.env_vars.{name}="${name}"' for name in JOB_VARIABLES]
    return [*found, *config.overrides]


def sft(recipe: Recipe, config: VerlConfig, place: Place) -> list[str]:
    """Return the overrides of `sft_trainer_ray`."""
    assert recipe.model is not None
    found = [f"model.path={recipe.model.path}", f"data.train_files={config.data}"]
    found += [f"data.train_batch_size={config.batch_size}", f"data.max_length={config.max_length}"]
    found += ["data.messages_key=messages", "data.truncation=right", f"optim.lr={config.lr:g}"]
    if config.tokens_per_gpu is not None:
        found += [f"data.max_token_len_per_gpu={config.tokens_per_gpu}"]
    found += [f"trainer.seed={recipe.seed}", f"trainer.max_ckpt_to_keep={recipe.checkpoint.keep}"]
    return [*found, *_common(recipe, place), *config.overrides]


def _actor(recipe: Recipe, config: VerlConfig) -> list[str]:
    assert recipe.model is not None
    tokens = config.tokens_per_gpu or recipe.budgets.max_seq_len
    actor = "actor_rollout_ref.actor"
    return [
        f"actor_rollout_ref.model.path={recipe.checkpoint.load_from or recipe.model.path}",
        f"{actor}.optim.lr={config.lr:g}",
        f"{actor}.ppo_mini_batch_size={config.mini_batch_groups or recipe.rollout.batch_groups}",
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu={tokens}",
        f"{actor}.use_kl_loss={_bool(config.kl_loss_coef > 0)}",
        f"{actor}.kl_loss_coef={config.kl_loss_coef:g}",
    ]


def _rollout(recipe: Recipe, engine: Sequence[str]) -> list[str]:
    r, e, sampling = recipe.rollout, recipe.evaluation, recipe.rollout.sampling
    top = "actor_rollout_ref.rollout"
    found = [f"{top}.name=sglang", f"{top}.mode=async", f"{top}.n={r.group_size}"]
    found += [f"{top}.temperature={sampling.temperature:g}", f"{top}.top_p={sampling.top_p:g}"]
    found += [f"{top}.top_k={sampling.top_k}", f"{top}.max_model_len={recipe.budgets.max_seq_len}"]
    found += [f"{top}.calculate_log_probs=true", f"{top}.val_kwargs.n={e.samples}"]
    found += [f"{top}.val_kwargs.do_sample=true", f"{top}.val_kwargs.temperature={sampling.temperature:g}"]
    # one process runs all episodes: it claims the run's attempt and writes its journal
    found += [f"{top}.agent.num_workers=1", f"{top}.agent.default_agent_loop={LOOP}"]
    found += [f"{top}.agent.agent_loop_config_path=$ROLLHOOK_JOB_FILES/{LOOP_FILE}"]
    for option, value in _options(engine):
        if option in _ROLLOUT:
            found.append(f"{top}.{_ROLLOUT[option]}={value}")
        elif option not in _LEFT:
            found.append(f"+{top}.engine_kwargs.sglang.{option[2:].replace('-', '_')}={value}")
    return found


def _trainer(recipe: Recipe, place: Place) -> list[str]:
    keep = recipe.checkpoint.keep
    return [
        f"trainer.max_actor_ckpt_to_keep={keep}",
        f"trainer.max_critic_ckpt_to_keep={keep}",
        *_common(recipe, place),
    ]


def _common(recipe: Recipe, place: Place) -> list[str]:
    return [
        "trainer.total_epochs=1000000",  # steps count
        f"trainer.total_training_steps={recipe.steps}",
        f"trainer.save_freq={recipe.checkpoint.every}",
        f"trainer.default_local_dir={place.run_dir}/checkpoints",
        f"trainer.project_name={recipe.name}",
        'trainer.experiment_name="$ROLLHOOK_RUN_ID"',
        "trainer.logger=[console]",
        f"trainer.nnodes={place.nodes}",
        f"trainer.n_gpus_per_node={place.gpus_per_node}",
    ]


def _options(argv: Sequence[str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for argument in argv:
        if argument.startswith("--"):
            option, _, value = argument.partition("=")
            found.append((option, value or "true"))
        elif found:
            found[-1] = (found[-1][0], argument)
    return found


def _bool(value: bool) -> str:
    return "true" if value else "false"
