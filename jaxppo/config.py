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

from jaxppo.config_algorithm import ActorConfig as ActorConfig
from jaxppo.config_algorithm import AlgorithmConfig as AlgorithmConfig
from jaxppo.config_algorithm import CriticConfig as CriticConfig
from jaxppo.config_algorithm import FilterGroupsConfig as FilterGroupsConfig
from jaxppo.config_algorithm import KLControlConfig as KLControlConfig
from jaxppo.config_algorithm import OptimizerConfig as OptimizerConfig
from jaxppo.config_algorithm import PolicyLossConfig as PolicyLossConfig
from jaxppo.config_algorithm import RolloutCorrectionConfig as RolloutCorrectionConfig
from jaxppo.config_guards import GuardsConfig as GuardsConfig


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
    trust_remote_code: bool = False
    """Run the Python code that a folder's tokenizer brings; false refuses such a folder."""
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
    val_top_k: int = -1
    """Of validation; -1 keeps the whole vocabulary."""
    val_top_p: float = 1.0
    """Of validation: the smallest set of tokens with this probability, over 0 up to 1."""
    val_n: int = 1
    """Responses per validation prompt; accuracy is their mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlongBufferConfig:
    """DAPO's soft penalty on length, added to the score."""

    enable: bool = False
    """Take something off responses that come near to data.max_response_length."""
    len: int = 0
    """The penalty begins so many tokens before data.max_response_length."""
    penalty_factor: float = 1.0
    """The penalty at data.max_response_length, in units of score."""


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
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


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
class DistributedConfig:
    """Several processes. All None: found by itself under SLURM, Open MPI, and from JAX_* variables (Kubernetes)."""

    coordinator_address: str | None = None
    """HOST:PORT of process 0."""
    num_processes: int | None = None
    """Of the whole run."""
    process_id: int | None = None
    """Of this one, from 0."""
    initialization_timeout_s: int = 300
    """How long to wait for the others, in seconds."""
    heartbeat_timeout_s: int = 30
    """A process that was not heard of for so many seconds is dead, and all end."""


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
    load_contents: tuple[Literal["model", "optimizer", "controller", "data"], ...] = (
        "model", "optimizer", "controller", "data",
    )  # fmt: skip
    """What a resume takes from the checkpoint; the rest is as in a new run, the step's number excepted."""
    max_ckpt_to_keep: int | None = None
    """None keeps all."""
    best_metric: str | None = None
    """The checkpoint with the greatest value of this metric is kept beside the newest ones."""
    log_val_generations: int = 3
    """Completions printed at each validation."""
    record_steps: tuple[int, ...] = ()
    """PPO steps to record whole under output_dir/recorded, each twice the size of a checkpoint, for jaxppo.replay."""
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
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)

    @property
    def needs_critic(self) -> bool:
        """Whether there is a value network at all."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether any KL to the reference enters the reward or the loss."""
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss

    @property
    def on_policy(self) -> bool:
        """One optimizer step per PPO step: the policy that learns is still the one that sampled, every ratio is 1."""
        return self.actor.ppo_epochs * self.minibatches_per_epoch == 1

    @property
    def needs_old_logp(self) -> bool:
        """Whether anything before the update, or the update itself, reads the policy's old log-probabilities.

        On policy they are what the update computes anyway, unless they enter the reward, weights of the loss, or the
        choice of tokens; a critic warm-up has updates without a policy's.
        """
        return not (
            self.on_policy
            and not self.algorithm.use_kl_in_reward
            and self.algorithm.rollout_correction.rollout_is == "none"
            and not self.algorithm.rollout_correction.rollout_rs
            and self.algorithm.adv_estimator != "optimal_token_baseline"
            and self.actor.policy_loss.loss_mode not in ("clip_cov", "kl_cov")
            and self.trainer.critic_warmup == 0
        )

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
