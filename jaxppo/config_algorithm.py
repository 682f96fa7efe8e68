"""Settings of the algorithm: rewards and advantages, the two losses and their optimizers. A part of `jaxppo.config`."""

import dataclasses
from dataclasses import field
from typing import Literal

KLKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip
AdvantageEstimator = Literal[
    "gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "grpo_passk",
    "optimal_token_baseline",
]  # fmt: skip
RejectionKind = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip
AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


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
    """Against the mismatch of engine and trainer: weights π_train / π_rollout of the policy loss, and rejection."""

    rollout_is: Literal["none", "token", "sequence"] = "none"
    """A weight of its own for each token, or one for the whole sequence."""
    threshold: float = 2.0
    """Weights are cut off above this."""
    rollout_rs: tuple[RejectionKind, ...] = ()
    """What a token, or a whole sequence, has to pass to stay in the losses: every one of these tests."""
    rollout_rs_threshold: tuple[str, ...] = ("2.0",)
    """One bound for all tests, or one for each: of a k1 test "LOWER_UPPER" (of ratios; "2" is "0.5_2"), else the
    greatest value."""

    @property
    def rejections(self) -> tuple[tuple[str, float, float], ...]:
        """(test, lower, upper) for each test. Raises ValueError where the thresholds are no such numbers."""
        texts = self.rollout_rs_threshold
        if len(texts) == 1:
            texts *= len(self.rollout_rs)
        found = []
        for kind, text in zip(self.rollout_rs, texts, strict=True):
            *lowest, upper = map(float, text.split("_"))
            lower = lowest[0] if lowest else 1 / upper
            in_order = 0 < lower < upper if kind.endswith("k1") else upper > 0 and not lowest
            if not in_order or len(lowest) > 1:
                raise ValueError(text)
            found.append((kind, lower, upper))
        return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: groups without signal are dropped and refilled from further prompts."""

    enable: bool = False
    """Drop prompts whose responses are all equal in `metric`."""
    metric: str = "score"
    """The reward function's own score, before any shaping, or the name of a further number that it returns (acc)."""
    max_num_gen_batches: int = 10
    """Batches of prompts that one step may take before the run ends with an error; 0 is no bound."""


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
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)


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
