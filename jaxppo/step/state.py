"""The values that go into and come out of a PPO step.

Legend: M minibatches, K microbatches (static capacity), B rows of one microbatch over all devices, T tokens of a
row. Index t speaks of the token at t: logp[t], value[t], reward[t], mask[t] and advantage[t] belong to choosing it.
"""

from typing import Any

import flax.struct
import jax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxppo.rl.kl import KLState

Params = Any
"""A nested dict of arrays."""


@flax.struct.dataclass
class TrainState:
    """All that the algorithm remembers between steps, and all that a checkpoint holds of it.

    Example, after 3 steps of an adaptive controller: step = 3, kl.coef = 0.00497, actor and critic the current
    parameters (float32 trees), the optimizer states their Adam moments and counts. The key never changes: step s
    draws from fold_in(key, s). The reference is not here: it is the base model's own parameters. Critic and critic_opt
    are None where the estimator of advantages needs no values.
    """

    actor: Params
    critic: Params
    actor_opt: Any
    critic_opt: Any
    kl: KLState
    step: Int[Array, ""]
    key: PRNGKeyArray


@flax.struct.dataclass
class PackedBatch:
    """One PPO step's sequences, packed into rows; what is fixed before any network has seen them.

    Example, one row of T = 8 with two sequences, prompt [7, 8] response [5, 2] and prompt [9] response [2]:

        tokens       7 8 5 2 9 2 0 0        segment_ids  1 1 1 1 2 2 0 0   (0 is padding)
        positions    0 1 2 3 0 1 0 0        mask         F F T T F T F F   (response tokens in the losses)
        scores       1 1 1 1 0 0 0 0        rollout_logp 0 0 -.1 -.2 0 -.3 0 0

    Every minibatch has the same static shape; only its first `num_microbatches[m]` microbatches hold tokens.
    """

    tokens: Int[Array, "M K B T"]
    positions: Int[Array, "M K B T"]
    segment_ids: Int[Array, "M K B T"]
    mask: Bool[Array, "M K B T"]
    scores: Float[Array, "M K B T"]
    """The sequence's score, at each of its tokens."""
    rollout_logp: Float[Array, "M K B T"]
    """The engine's own log-probabilities at response tokens."""
    group_ids: Int[Array, "M K B T"]
    """The sequence's prompt, at each of its tokens: responses to one prompt are one group. From 0; 0 at padding too."""
    baselines: Float[Array, "M K B T"]
    """The score of the prompt's greedy response, at each of the sequence's tokens; 0 where none was sampled."""
    num_microbatches: Int[Array, " M"]
    num_sequences: Int[Array, ""]
    """Of the whole batch, those without any token in the losses included."""


@flax.struct.dataclass
class Experience:
    """A packed batch with everything that the losses need and that the update must not change."""

    batch: PackedBatch
    old_logp: Float[Array, "M K B T"] | None
    """None where nothing needs them (Config.needs_old_logp)."""
    ref_logp: Float[Array, "M K B T"] | None
    """None where no KL to the reference is used."""
    values: Float[Array, "M K B T"] | None
    """None without a critic."""
    advantages: Float[Array, "M K B T"]
    """Whitened over the whole batch where the estimator says so."""
    returns: Float[Array, "M K B T"]
    kl: Float[Array, ""]
    """Mean over sequences of the token-mean KL to the reference, of the kind used in the reward."""
    importance: Float[Array, "M K B T"] | None
    """Weights of the policy loss against the engine's mismatch; None where rollout_correction is off."""
    chosen: Bool[Array, "M K B T"] | None
    """Tokens that clip_cov or kl_cov treats apart; None with another policy loss."""
    metrics: dict[str, jax.Array]


def microbatch(tree: Any, m: int | Int[Array, ""], k: int | Int[Array, ""]) -> Any:
    """Microbatch k of minibatch m: every [M, K, B, T] array of a batch or an experience becomes [B, T]."""
    return jax.tree.map(lambda x: x[m, k] if x.ndim == 4 else x, tree)
