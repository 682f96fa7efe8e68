"""The one place where settings are checked, before anything is loaded or compiled."""

import dataclasses
import math
import typing
from types import NoneType
from typing import Any, Literal

from jaxppo.config import Config, ConfigError, RolloutConfig, did_you_mean

VLLM_ONLY = (
    "sleep_level", "tensor_parallel_size", "enforce_eager", "gpu_memory_utilization", "max_num_batched_tokens"
)  # fmt: skip

COMPARING = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk", "optimal_token_baseline")
"""Estimators for which a prompt needs several responses."""
OF_SEQUENCES = ("gspo", "sapo", "geo_mean")
"""Policy losses that are means over whole sequences."""


def check(config: Config) -> Config:
    """The config as it was given. Raises ConfigError naming the settings, their values and the valid ones."""
    check_types(config)
    _check_numbers(config)
    _check_batches(config)
    _require(config.mesh.expert == 1, "mesh.expert", config.mesh.expert, "1: the axis is reserved")
    _check_kl(config)
    _check_estimator(config)
    _check_policy_loss(config)
    _check_sampling(config)
    _check_rejection(config)
    _check_data(config)
    _check_engine(config)
    _check_guards(config)
    return config


def settings(section: type = Config, prefix: str = "") -> dict[str, Any]:
    """The type of every setting below a section. Example: {"actor.lr": float, "data.train_files": tuple[str, ...]}."""
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(section).items():
        found |= (
            settings(kind, f"{prefix}{name}.")
            if isinstance(kind, type) and dataclasses.is_dataclass(kind)
            else {f"{prefix}{name}": kind}
        )
    return found


def check_types(section: Any, prefix: str = "") -> None:
    """Values and choices of what a config file gave: Python itself has not looked at them. Raises ConfigError."""
    for field, kind in typing.get_type_hints(type(section)).items():
        name, value = f"{prefix}{field}", getattr(section, field)
        valid = in_words(kind)
        if typing.get_origin(kind) is Literal:
            valid += did_you_mean(str(value), map(str, typing.get_args(kind)))
        _require(_fits(value, kind), name, repr(value), valid)
        if dataclasses.is_dataclass(kind):
            check_types(value, f"{name}.")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a field's type; True and False are no numbers, and whole numbers fit 32 bits."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return any(value == x and type(value) is type(x) for x in arguments)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if arguments:  # X | None
        return any(_fits(value, x) for x in arguments)
    if kind in (int, float) and type(value) is int:
        return -(2**31) <= value < 2**32
    return isinstance(value, kind) and (kind is not int or type(value) is int)


def in_words(kind: Any) -> str:
    """What may stand in a field. Example: tuple[float, float] is "a tuple of 2, each a number"."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return ", ".join(map(str, arguments))
    if typing.get_origin(kind) is tuple:
        how_many = "such as (x, y) or (x,)" if arguments[-1] is ... else f"of {len(arguments)}"
        return f"a tuple {how_many}, each {in_words(arguments[0])}"
    if arguments:
        return " or ".join(map(in_words, arguments))
    words = {bool: "True or False", int: "an integer of 32 bits", float: "a number", str: "a string", NoneType: "None"}
    return words.get(kind, f"jaxppo.config.{kind.__name__}")


def _require(valid: bool, setting: str, value: Any, valid_values: str) -> None:
    if not valid:
        raise ConfigError(f"{setting} = {value}: valid is {valid_values}")


def _check_numbers(c: Config) -> None:
    positive = {
        "data.train_batch_size": c.data.train_batch_size,
        "data.max_prompt_length": c.data.max_prompt_length,
        "data.max_response_length": c.data.max_response_length,
        "rollout.n": c.rollout.n,
        "rollout.val_n": c.rollout.val_n,
        "rollout.max_num_seqs": c.rollout.max_num_seqs,
        "rollout.max_num_batched_tokens": c.rollout.max_num_batched_tokens,
        "rollout.tensor_parallel_size": c.rollout.tensor_parallel_size,
        "rollout.max_logp_diff": c.rollout.max_logp_diff,
        "rollout.temperature": c.rollout.temperature,
        "actor.ppo_mini_batch_size": c.actor.ppo_mini_batch_size,
        "actor.ppo_epochs": c.actor.ppo_epochs,
        "actor.clip_ratio_low": c.actor.clip_ratio_low,
        "actor.clip_ratio_high": c.actor.clip_ratio_high,
        "actor.tau_pos": c.actor.tau_pos,
        "actor.tau_neg": c.actor.tau_neg,
        "actor.max_tokens_per_device": c.actor.max_tokens_per_device,
        "actor.grad_clip": c.actor.grad_clip,
        "critic.grad_clip": c.critic.grad_clip,
        "critic.cliprange_value": c.critic.cliprange_value,
        "algorithm.kl_ctrl.target_kl": c.algorithm.kl_ctrl.target_kl,
        "algorithm.kl_ctrl.horizon": c.algorithm.kl_ctrl.horizon,
        "algorithm.rollout_correction.threshold": c.algorithm.rollout_correction.threshold,
        "reward.timeout_s": c.reward.timeout_s,
        "reward.memory_gb": c.reward.memory_gb,
        "trainer.total_epochs": c.trainer.total_epochs,
        "guards.window": c.guards.window,
        "guards.kl_max": c.guards.kl_max,
        "guards.grad_norm_spike": c.guards.grad_norm_spike,
    }
    for setting, value in positive.items():
        _require(math.isfinite(value) and value > 0, setting, value, "a number > 0")
    not_negative = {
        "rollout.val_temperature": c.rollout.val_temperature,
        "actor.lr": c.actor.lr,
        "critic.lr": c.critic.lr,
        "actor.weight_decay": c.actor.weight_decay,
        "critic.weight_decay": c.critic.weight_decay,
        "actor.entropy_coeff": c.actor.entropy_coeff,
        "actor.policy_loss.ppo_kl_coef": c.actor.policy_loss.ppo_kl_coef,
        "actor.kl_loss_coef": c.actor.kl_loss_coef,
        "algorithm.kl_ctrl.kl_coef": c.algorithm.kl_ctrl.kl_coef,
        "actor.lr_warmup_steps": c.actor.lr_warmup_steps,
        "critic.lr_warmup_steps": c.critic.lr_warmup_steps,
        "reward.num_workers": c.reward.num_workers,
        "reward.retries": c.reward.retries,
        "trainer.critic_warmup": c.trainer.critic_warmup,
        "trainer.log_val_generations": c.trainer.log_val_generations,
        "guards.kl_min": c.guards.kl_min,
        "guards.entropy_min": c.guards.entropy_min,
        "guards.plateau_change": c.guards.plateau_change,
        "guards.max_rollbacks": c.guards.max_rollbacks,
    }
    for setting, value in not_negative.items():
        _require(math.isfinite(value) and value >= 0, setting, value, "a number >= 0")
    for setting, value in {"trainer.seed": c.trainer.seed, "data.seed": c.data.seed}.items():
        _require(0 <= value < 2**32, setting, value, f"an integer from 0 to {2**32 - 1}")
    unit = {"algorithm.gamma": c.algorithm.gamma, "algorithm.lam": c.algorithm.lam}
    unit |= {"guards.reward_drop": c.guards.reward_drop, "guards.rollback_factor": c.guards.rollback_factor}
    unit |= {"actor.min_lr_ratio": c.actor.min_lr_ratio, "critic.min_lr_ratio": c.critic.min_lr_ratio}
    for setting, value in unit.items():
        _require(0 <= value <= 1, setting, value, "a number from 0 to 1")
    for setting, betas in {"actor.betas": c.actor.betas, "critic.betas": c.critic.betas}.items():
        _require(all(0 <= beta < 1 for beta in betas), setting, betas, "two numbers from 0 to under 1")
    _require(math.isfinite(c.reward.error_score), "reward.error_score", c.reward.error_score, "a finite number")
    for setting, value in {"rollout.top_p": c.rollout.top_p, "rollout.val_top_p": c.rollout.val_top_p}.items():
        _require(0 < value <= 1, setting, value, "a number over 0 up to 1")
    for setting, value in {"rollout.top_k": c.rollout.top_k, "rollout.val_top_k": c.rollout.val_top_k}.items():
        _require(value == -1 or value > 0, setting, value, "-1 (all) or > 0")
    _require(c.actor.clip_ratio_c > 1, "actor.clip_ratio_c", c.actor.clip_ratio_c, "a number > 1")
    for setting, value in {"trainer.save_freq": c.trainer.save_freq, "trainer.test_freq": c.trainer.test_freq}.items():
        _require(value == -1 or value > 0, setting, value, "-1 (only at the end) or a number of steps > 0")
    for step in c.trainer.record_steps:
        _require(step >= 1, "trainer.record_steps", step, "numbers of steps >= 1")
    optional = {
        "trainer.total_training_steps": c.trainer.total_training_steps,
        "trainer.max_ckpt_to_keep": c.trainer.max_ckpt_to_keep,
        "guards.grad_norm_max": c.guards.grad_norm_max,
        "guards.rollback_lr": c.guards.rollback_lr,
    }
    for setting, value in optional.items():
        _require(value is None or value > 0, setting, value, "None or a number > 0")
    for setting, value in {
        "data.train_max_samples": c.data.train_max_samples,
        "data.val_max_samples": c.data.val_max_samples,
    }.items():
        _require(value == -1 or value > 0, setting, value, "-1 (all) or a number > 0")


def _check_batches(c: Config) -> None:
    batch, minibatch = c.data.train_batch_size, c.actor.ppo_mini_batch_size
    if batch % minibatch:
        divisors = ", ".join(str(d) for d in range(1, batch + 1) if batch % d == 0)
        raise ConfigError(
            f"actor.ppo_mini_batch_size = {minibatch} does not divide data.train_batch_size = {batch}: "
            f"valid sizes are {divisors}"
        )
    longest = c.max_sequence_length
    lengths = f"data.max_prompt_length + data.max_response_length = {longest}"
    if c.actor.row_length is not None and c.actor.row_length < longest:
        raise ConfigError(f"actor.row_length = {c.actor.row_length}: must be at least {lengths}")
    if c.tokens_per_row_group < c.row_length:
        shared = f" x mesh.context = {c.mesh.context}" if c.mesh.context > 1 else ""
        raise ConfigError(
            f"actor.max_tokens_per_device = {c.actor.max_tokens_per_device}{shared}: must be at least a row of "
            f"{c.row_length} tokens ({lengths})"
        )


def _check_kl(c: Config) -> None:
    if c.algorithm.use_kl_in_reward and c.actor.use_kl_loss:
        raise ConfigError(
            "algorithm.use_kl_in_reward and actor.use_kl_loss are both true: the KL is a penalty in the reward or a "
            "loss, set one to false"
        )
    control = c.algorithm.kl_ctrl
    if c.algorithm.use_kl_in_reward and control.type == "adaptive":
        _require(
            control.kl_coef > 0,
            "algorithm.kl_ctrl.kl_coef",
            control.kl_coef,
            "a number > 0: the adaptive controller multiplies it, and would never leave 0",
        )
        _require(
            c.sequences_per_step <= 5 * control.horizon,
            "algorithm.kl_ctrl.horizon",
            control.horizon,
            f"at least a fifth of the {c.sequences_per_step} sequences of a step, or one step could set the "
            "coefficient to 0",
        )


def _check_estimator(c: Config) -> None:
    """Settings of a critic where there is none; groups of one where an estimator compares responses."""
    estimator = f"algorithm.adv_estimator = {c.algorithm.adv_estimator}"
    if c.algorithm.adv_estimator in COMPARING:
        _require(c.rollout.n > 1, "rollout.n", c.rollout.n, f"2 or more with {estimator}: it compares responses")
    if not c.needs_critic:
        without = f"with {estimator}: it has no critic"
        _require(c.critic.path is None, "critic.path", c.critic.path, f"None {without}")
        _require(c.trainer.critic_warmup == 0, "trainer.critic_warmup", c.trainer.critic_warmup, f"0 {without}")
        _require("critic" not in c.rollout.offload, "rollout.offload", c.rollout.offload, f"no critic {without}")


def _check_sampling(c: Config) -> None:
    if c.rollout.val_temperature == 0:
        valid = "1 with rollout.val_temperature = 0: greedy responses are all the same"
        _require(c.rollout.val_n == 1, "rollout.val_n", c.rollout.val_n, valid)
    rule, buffer = c.algorithm.filter_groups, c.reward.overlong_buffer
    most = rule.max_num_gen_batches
    _require(most >= 0, "algorithm.filter_groups.max_num_gen_batches", most, "0 (no bound) or a number > 0")
    if rule.enable:
        _require(c.rollout.n > 1, "rollout.n", c.rollout.n, "2 or more with algorithm.filter_groups.enable")
    if buffer.enable:
        longest = c.data.max_response_length
        up_to = f"1 to data.max_response_length = {longest}"
        _require(0 < buffer.len <= longest, "reward.overlong_buffer.len", buffer.len, up_to)
        factor = buffer.penalty_factor
        _require(0 < factor < math.inf, "reward.overlong_buffer.penalty_factor", factor, "a number > 0")


def _check_rejection(c: Config) -> None:
    correction = c.algorithm.rollout_correction
    try:
        len(correction.rejections)
    except (ValueError, ZeroDivisionError):
        given = correction.rollout_rs_threshold
        words = 'one for all tests or one for each, such as ("0.5_2.0",) for a k1 test and ("0.01",) for another'
        raise ConfigError(f"algorithm.rollout_correction.rollout_rs_threshold = {given}: valid is {words}") from None


def _check_policy_loss(c: Config) -> None:
    loss, mode = c.actor.policy_loss, c.actor.policy_loss.loss_mode
    if mode in OF_SEQUENCES:
        only = "seq-mean-token-mean"
        name = f"actor.policy_loss.loss_mode = {mode}"
        _require(c.actor.loss_agg_mode == only, "actor.loss_agg_mode", c.actor.loss_agg_mode, f"{only} with {name}")
    for setting, value in {"clip_cov_ratio": loss.clip_cov_ratio, "kl_cov_ratio": loss.kl_cov_ratio}.items():
        _require(0 < value <= 1, f"actor.policy_loss.{setting}", value, "a number over 0 up to 1")
    below = f"a number above actor.policy_loss.clip_cov_lb = {loss.clip_cov_lb}"
    _require(loss.clip_cov_lb < loss.clip_cov_ub, "actor.policy_loss.clip_cov_ub", loss.clip_cov_ub, below)


def _check_data(c: Config) -> None:
    _require(bool(c.data.train_files), "data.train_files", c.data.train_files, "at least one .parquet or .jsonl file")


def _check_engine(c: Config) -> None:
    """Settings that only vLLM has do nothing elsewhere, so they are refused there."""
    if c.rollout.engine == "vllm":
        return
    for name in VLLM_ONLY:
        value, only = getattr(c.rollout, name), getattr(RolloutConfig(), name)
        valid = f"{only} with rollout.engine = {c.rollout.engine}: it is vLLM's"
        _require(value == only, f"rollout.{name}", value, valid)


def _check_guards(c: Config) -> None:
    limit = c.guards.grad_norm_max
    valid = "a number > 0 with guards.grad_norm = skip"
    _require(c.guards.grad_norm != "skip" or limit is not None, "guards.grad_norm_max", limit, valid)
    best = c.trainer.best_metric
    if best is not None and best.startswith("val-"):
        _require(bool(c.data.val_files), "trainer.best_metric", best, "a metric of the steps without data.val_files")
