"""Every setting of a run, in verl's words, and the one place where they are checked.

A config file defines `config() -> Config`; the command line overrides single fields
(`--algorithm.kl-ctrl.target-kl 0.05`). Defaults are verl's unless the field says otherwise. Lengths are in
tokens, KL in nats, learning rates per optimizer step.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import field
from typing import Literal

KLKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip
AdvantageEstimator = Literal[
    "gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "grpo_passk",
]  # fmt: skip
AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class UserError(Exception):
    """A mistake in what the user gave: command lines print it as one line, without a traceback."""


class ConfigError(UserError):
    """A setting has a value that it cannot have; the message names the setting, the value and the valid ones."""


def did_you_mean(given: str, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """What an error adds where a valid name is near. Example: " (did you mean qwen2?)"."""
    near = difflib.get_close_matches(given, list(valid), n=1, cutoff=cutoff)
    return f" (did you mean {near[0]}?)" if near else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The actor's network; reference and critic start from the same one."""

    path: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """Hugging Face folder or hub id."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Where the weights come from; "random" still reads the folder's config.json and tokenizer."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Matrix products and activations."""
    param_dtype: Literal["bfloat16", "float32"] = "float32"
    """Master weights and optimizer state."""
    remat: Literal["none", "dots", "full"] = "full"
    """What the backward pass recomputes: nothing, all but matrix products, or each layer."""
    layers: Literal["auto", "scan", "unroll"] = "auto"
    """One compiled body for all layers, or each written out: slower to compile, and a faster update, since nothing of
    what the backward pass needs is copied into stacks; "auto" is unroll on a GPU, scan on the CPU."""
    attention: Literal["auto", "cudnn_packed", "xla"] = "auto"
    """Kernel for packed rows; "auto" is xla on the CPU and cudnn_packed on a GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts for training and validation: verl-format parquet, or JSONL rows."""

    train_files: tuple[str, ...] = ()
    """.parquet or .jsonl files."""
    val_files: tuple[str, ...] = ()
    """The same for validation; none is no validation."""
    prompt_key: str = "prompt"
    """Column with the prompt: a list of chat messages, or a string."""
    train_batch_size: int = 1024
    """Prompts in one PPO step."""
    max_prompt_length: int = 512
    """Tokens, chat template included."""
    max_response_length: int = 512
    """Tokens; a response still without an end there is cut off."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than max_prompt_length (counted) instead of applying `truncation`."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a longer prompt: an error, or the side that is cut away."""
    train_max_samples: int = -1
    """Use only the first rows of the training files; -1 is all."""
    val_max_samples: int = -1
    """The same for the validation files."""
    shuffle: bool = True
    """A new prompt order each epoch; without it, the files' order."""
    seed: int = 1
    """Of the prompt order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled."""

    engine: Literal["jax", "vllm"] = "jax"
    """The built-in engine, which samples from the trainer's own arrays, or vLLM in the same process."""
    n: int = 1
    """Responses per prompt."""
    temperature: float = 1.0
    """Divides the logits, while sampling and in every loss; > 0."""
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability; 1 is all of them."""
    max_num_seqs: int = 256
    """Sequences that decode at the same time, over all devices (vllm: in each engine)."""
    max_num_batched_tokens: int = 8192
    """vllm: tokens of one forward pass, prompts and decoding together."""
    gpu_memory_utilization: float = 0.5
    """vllm: its share of a GPU's memory; jax gets what is left."""
    tensor_parallel_size: int = 1
    """vllm: GPUs (processes) that share one engine; the engines are data-parallel."""
    enforce_eager: bool = False
    """vllm: no compilation and no CUDA graphs."""
    sleep_level: Literal[0, 1, 2] = 0
    """vllm, between rollouts: 0 keeps its memory; 1 frees the KV cache and moves the weights to the host; 2 frees
    both, since the next publish brings the weights."""
    offload: tuple[Literal["optimizer", "critic", "reference"], ...] = ()
    """What moves to pinned host memory during rollouts."""
    max_logp_diff: float = 0.1
    """A step's mean |log-prob(trainer) - log-prob(engine)| above this, in nats, is reported as an alarm."""
    val_temperature: float = 0.0
    """0 is greedy."""
    val_n: int = 1
    """Responses per validation prompt; accuracy is their mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLControlConfig:
    """Coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """"adaptive" moves the coefficient after each step, towards target_kl."""
    kl_coef: float = 0.001
    """The coefficient, or where the adaptive one starts."""
    target_kl: float = 0.1
    """Nats per token: mean over sequences of their token means."""
    horizon: int = 10000
    """Sequences over which the coefficient can change by up to a factor e^0.2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """Importance weights π_train / π_rollout of the policy loss, against the mismatch of engine and trainer."""

    rollout_is: Literal["none", "token", "sequence"] = "none"
    """A weight of its own for each token, or one for the whole sequence."""
    threshold: float = 2.0
    """Weights are cut off above this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Rewards and advantages."""

    adv_estimator: AdvantageEstimator = "gae"
    """How good a token was: by a critic (gae), or against the prompt's other responses (rollout.n), their greedy one
    (remax) or the batch (reinforce_plus_plus)."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo, grpo_passk: divide by the standard deviation of the group; False is Dr.GRPO."""
    gamma: float = 1.0
    """Discount from token to token, 0 to 1."""
    lam: float = 1.0
    """Lambda of GAE, 0 to 1."""
    use_kl_in_reward: bool = False
    """Take kl_coef times the KL to the reference off the reward of each token."""
    kl_penalty: KLKind = "kl"
    """Estimator of the KL in the reward."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW: decoupled decay on every parameter, gradients clipped by the network's global norm."""

    lr: float = 1e-6
    """Learning rate of an optimizer step, after warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square, by optimizer step."""
    weight_decay: float = 0.01
    """An optimizer step takes lr times this share off every parameter."""
    grad_clip: float = 1.0
    """Greatest global norm of a gradient; a longer one is scaled down to it."""
    lr_warmup_steps: int = 0
    """PPO steps of linear warm-up from 0."""
    lr_scheduler: Literal["constant", "cosine"] = "constant"
    """After warm-up; cosine ends at min_lr_ratio * lr at the last PPO step."""
    min_lr_ratio: float = 0.0
    """Where cosine ends, as a share of lr, 0 to 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    """Which loss, and what only some of them read."""

    loss_mode: Literal["vanilla", "gspo", "sapo", "geo_mean", "cispo", "gpg", "clip_cov", "kl_cov"] = "vanilla"
    """PPO's clipped loss with the dual clip, or another one."""
    clip_cov_ratio: float = 0.0002
    """clip_cov: the share of a minibatch's tokens that lose their gradient."""
    clip_cov_lb: float = 1.0
    """clip_cov: they are drawn from those whose covariance of advantage and log-probability is above this,"""
    clip_cov_ub: float = 5.0
    """clip_cov: and below this."""
    kl_cov_ratio: float = 0.0002
    """kl_cov: the share of a minibatch's tokens, those of greatest covariance, with a KL penalty of their own."""
    ppo_kl_coef: float = 0.1
    """kl_cov: weight of that penalty."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorConfig(OptimizerConfig):
    """The policy's update; the minibatch settings hold for the critic as well."""

    ppo_mini_batch_size: int = 256
    """Prompts in one optimizer step."""
    ppo_epochs: int = 1
    """Passes over a step's batch."""
    max_tokens_per_device: int = 16384
    """Tokens of one microbatch on one device, padding included."""
    row_length: int | None = None
    """Tokens of one packed row; None is 4 times the longest sequence, at most 4096 (but no shorter than it)."""
    clip_ratio_low: float = 0.2
    """The least trusted ratio of new to old policy is 1 - this."""
    clip_ratio_high: float = 0.2
    """The greatest is 1 + this; outside, a token that would go on moving away has no gradient."""
    clip_ratio_c: float = 3.0
    """Dual clip: bounds the loss for negative advantages."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    tau_pos: float = 1.0
    """sapo: steepness of the gate for positive advantages."""
    tau_neg: float = 1.05
    """sapo: and for the others."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus in the loss (nats per token)."""
    use_kl_loss: bool = False
    """Add kl_loss_coef times the KL to the reference to the loss; excludes algorithm.use_kl_in_reward."""
    kl_loss_coef: float = 0.001
    """Weight of that KL."""
    kl_loss_type: KLKind = "low_var_kl"
    """Estimator of that KL."""
    loss_agg_mode: AggregationMode = "token-mean"
    """How token losses become one number: over all tokens of a minibatch, or sequence by sequence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig(OptimizerConfig):
    """The value network."""

    path: str | None = None
    """Hugging Face folder or hub id of its backbone; None is the actor's."""
    lr: float = 1e-5
    """Learning rate of an optimizer step, after warm-up."""
    cliprange_value: float = 0.5
    """A new value counts no further from the old one than this, in units of reward."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Where scores come from."""

    function: str = "gsm8k"
    """"gsm8k", "gsm8k_verl", "arithmetic", "math" (math-verify), or "FILE.py:NAME" with verl's signature
    compute_score(data_source, solution_str, ground_truth, extra_info), also async, or batched: data_sources, ..."""
    num_workers: int = 4
    """Processes that call the function ("math" and FILE.py:NAME); 0 calls it in the run's own, where a debugger
    reaches it and nothing guards the run."""
    timeout_s: float = 30.0
    """Of one sample, in seconds (of the whole call where it is batched); then its worker is replaced."""
    retries: int = 1
    """How often a sample is tried again that raised, timed out or took its worker down."""
    memory_gb: float = 4.0
    """Of one worker, in GiB; a sample that wants more costs itself."""
    error_score: float = 0.0
    """Of a sample that failed in the end; such samples are counted in reward/errors, timeouts and crashes."""
    truncated: Literal["keep", "zero", "mask"] = "keep"
    """Responses cut off at max_response_length: scored as they are, scored 0, or left out of every loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis; one -1 takes what is left."""

    data: int = 1
    """Copies of the networks; each takes its share of the rows."""
    fsdp: int = -1
    """Devices that split parameters, optimizer state and rows among them."""
    context: int = 1
    """Devices that split the tokens of each row among them, and parameters and optimizer state as fsdp does."""
    tensor: int = 1
    """Devices that split heads and layers' widths among them."""
    expert: int = 1
    """Reserved: only 1 is valid."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The loop."""

    output_dir: str = "runs/default"
    """Folder of config.json, metrics.jsonl, metrics.png and checkpoints."""
    total_epochs: int = 30
    """Passes over the training prompts."""
    total_training_steps: int | None = None
    """Overrides total_epochs."""
    save_freq: int = -1
    """PPO steps between checkpoints; -1 saves only the last step."""
    test_freq: int = -1
    """PPO steps between validations; -1 validates only after the last step."""
    val_before_train: bool = True
    """Validate before the first step as well."""
    critic_warmup: int = 0
    """PPO steps in which only the critic learns."""
    resume: str = "auto"
    """"auto" (the newest complete checkpoint in output_dir, if any), "never", or a checkpoint's path."""
    max_ckpt_to_keep: int | None = None
    """None keeps all."""
    log_val_generations: int = 3
    """Completions printed at each validation."""
    seed: int = 0
    """Of sampling and of random initial weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def needs_critic(self) -> bool:
        """Whether there is a value network at all."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether any KL to the reference enters the reward or the loss."""
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss

    @property
    def sequences_per_step(self) -> int:
        return self.data.train_batch_size * self.rollout.n

    @property
    def max_sequence_length(self) -> int:
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def row_length(self) -> int:
        """Tokens of one packed row."""
        longest = self.max_sequence_length
        limit = min(4096, self.tokens_per_row_group)
        derived = max(longest, min(4 * longest, limit))
        return derived if self.actor.row_length is None else self.actor.row_length

    @property
    def tokens_per_row_group(self) -> int:
        """Tokens of one microbatch on the devices that share its rows: max_tokens_per_device on each."""
        return self.actor.max_tokens_per_device * max(self.mesh.context, 1)

    @property
    def minibatches_per_epoch(self) -> int:
        return self.data.train_batch_size // self.actor.ppo_mini_batch_size
