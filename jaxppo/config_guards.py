"""Settings of the guards over a run's metrics. A part of `jaxppo.config`."""

import dataclasses
from typing import Literal

Action = Literal["log", "rollback", "stop"]
"""What a guard does beside telling: go back to the last checkpoint with another learning rate, or save and stop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardsConfig:
    """What each step's metrics are held against. A guard's action is "log", "rollback" or "stop"; None turns it off.

    Only a single batch or minibatch can be skipped; a policy that has collapsed would be skipped for ever.
    """

    window: int = 10
    """Steps whose mean is judged where a guard speaks of a window."""
    nonfinite: Action = "log"
    """After a step with gradients that are not finite; their updates are skipped in any case; those that
    grad_norm = skip leaves out count here as well."""
    kl: Action | None = "log"
    """KL to the reference outside kl_min to kl_max."""
    kl_max: float = 0.2
    """Nats per token, of one step."""
    kl_min: float = 0.005
    """Nats per token, of the window: the policy hardly moves. Advice, whatever the action."""
    reward: Action | None = "log"
    """Reward collapse, over the window."""
    reward_drop: float = 0.5
    """Share of the best window's mean score that is lost, where that is above 0."""
    entropy: Action | None = "log"
    """Entropy collapse, over the window."""
    entropy_min: float = 0.01
    """Nats per token."""
    explained_variance: Action | None = "log"
    """The critic explains less of the returns than explained_variance_min, over the window. Advice while it learns."""
    explained_variance_min: float = -1.0
    """0 is a critic that knows no more than the mean of the returns."""
    grad_norm: Literal["log", "skip", "rollback", "stop"] | None = "log"
    """A gradient norm above its limit; "skip" leaves out the minibatches above grad_norm_max, inside the update."""
    grad_norm_max: float | None = None
    """Limit of either network's norm, before clipping; None is grad_norm_spike alone."""
    grad_norm_spike: float = 10.0
    """Limit as a multiple of the window's median."""
    mismatch: Literal["log", "skip", "rollback", "stop"] = "log"
    """A step above rollout.max_logp_diff; "skip" makes no update from its batch."""
    plateau: Literal["log", "stop"] | None = None
    """Policy and value loss both change less than plateau_change over the window; "stop" is an early end."""
    plateau_change: float = 1e-4
    """Greatest less smallest loss."""
    max_rollbacks: int = 3
    """Roll-backs of a whole run, resumes included; the next one stops it."""
    rollback_lr: float | None = 5e-7
    """The actor's highest learning rate after a roll-back, the critic's in proportion; None uses rollback_factor."""
    rollback_factor: float = 0.5
    """Multiplies both learning rates at each roll-back where rollback_lr is None."""
