"""PPO's losses, as sums and counts that add over microbatches; whoever has all of them divides, once.

Each loss comes per token, 0 outside the mask, for `aggregate`; the metrics come as sums over the mask.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxppo.rl.masked import full_precision, keep, masked_sum, masked_variance, segment_sum
from jaxppo.rl.segments import last_tokens


@flax.struct.dataclass
class PolicyLoss:
    """Example, one token with advantage 1 and ratio 2, clip_high = 0.2:
    loss [-1.2], pg_clipfrac 1, pg_clipfrac_lower 0, ppo_kl -0.69, count 1.
    """

    loss: Float[Array, "*batch T"]
    """Per token, 0 outside the mask."""
    pg_clipfrac: Float[Array, ""]
    """Tokens whose ratio was clipped."""
    pg_clipfrac_lower: Float[Array, ""]
    """Tokens with a negative advantage whose loss was bounded by clip_c."""
    ppo_kl: Float[Array, ""]
    """Σ (old_logp - logp): k1 of the old policy against the new one; not the KL to the reference."""
    count: Float[Array, ""]
    """Tokens of the mask."""


@flax.struct.dataclass
class ValueLoss:
    """Example, one token with value 2, old value 1, return 0 and clip = 0.2:
    loss [2.0], vf_clipfrac 0, vpred 2, count 1.
    """

    loss: Float[Array, "*batch T"]
    """Per token, the factor 1/2 included; 0 outside the mask."""
    vf_clipfrac: Float[Array, ""]
    """Tokens whose loss is that of the clipped value."""
    vpred: Float[Array, ""]
    """Σ values."""
    count: Float[Array, ""]
    """Tokens of the mask."""


def policy_loss(
    logp: Float[Array, "*batch T"],
    old_logp: Float[Array, "*batch T"],
    advantages: Float[Array, "*batch T"],
    mask: Bool[Array, "*batch T"],
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """The clipped surrogate (Schulman et al. 2017, eq. 7) with the dual clip (Ye et al. 2020, eq. 5):

        r = exp(logp - old_logp)     L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        for A < 0:  min(L, -A clip_c)

    The log-ratio is held within ±20. Equal log-probabilities give r = 1 exactly, and where clipped and
    unclipped agree the gradient is the unclipped one's. Raises ValueError unless clip_c > 1.
    """
    if not clip_c > 1:
        raise ValueError(f"clip_c = {clip_c}: must be > 1")
    advantages = keep(advantages, mask)
    log_ratio = jnp.clip(keep(logp, mask) - keep(old_logp, mask), -20, 20)
    ratio = jnp.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    bound = -advantages * clip_c
    is_clipped = clipped > plain
    loss = jnp.where(is_clipped, clipped, plain)
    is_bounded = (advantages < 0) & (loss > bound)
    return PolicyLoss(
        loss=keep(jnp.where(is_bounded, bound, loss), mask),
        pg_clipfrac=_count(is_clipped & mask, loss),
        pg_clipfrac_lower=_count(is_bounded & mask, loss),
        ppo_kl=masked_sum(-log_ratio, mask),
        count=_count(mask, loss),
    )


def value_loss(
    values: Float[Array, "*batch T"],
    old_values: Float[Array, "*batch T"],
    returns: Float[Array, "*batch T"],
    mask: Bool[Array, "*batch T"],
    *,
    clip: ArrayLike,
) -> ValueLoss:
    """½ max((V - R)², (clip(V, V_old ± clip) - R)²): the larger, so that clipping never hides an error."""
    values, old_values, returns = keep(values, mask), keep(old_values, mask), keep(returns, mask)
    clipped = jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - returns)
    plain = jnp.square(values - returns)
    is_clipped = clipped > plain
    loss = keep(0.5 * jnp.where(is_clipped, clipped, plain), mask)
    return ValueLoss(
        loss=loss,
        vf_clipfrac=_count(is_clipped & mask, loss),
        vpred=masked_sum(values, mask),
        count=_count(mask, loss),
    )


def entropy_from_logits(logits: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    """H = -Σ p log p in nats, p = softmax(logits); logits of -inf add nothing and get no gradient."""
    logits = full_precision(logits)
    possible = logits > -jnp.inf
    logp = jnp.where(possible, jax.nn.log_softmax(logits, axis=-1), 0)
    return -jnp.where(possible, jnp.exp(logp) * logp, 0).sum(axis=-1)


def aggregate(
    loss: Float[Array, "*batch T"],
    mask: Bool[Array, "*batch T"],
    segment_ids: Int[Array, "*batch T"],
    mode: str,
    *,
    norm_length: int | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum, count) of a loss per token. Both add over microbatches: the minibatch's loss is Σ sum / Σ count.

        token-mean                sum over tokens                                  tokens
        seq-mean-token-sum        sum over tokens                                  sequences
        seq-mean-token-mean       sum over sequences of the mean of their tokens   sequences
        seq-mean-token-sum-norm   sum over tokens / norm_length                    sequences

    Sequences are segments with at least one token in the mask. norm_length is the greatest response length:
    it belongs to the run, where a row's own length would change with the packing. (verl divides this mode's
    sum by a length alone, so that the loss grows with the number of sequences in a microbatch.)
    Raises ValueError for another mode, or for seq-mean-token-sum-norm without norm_length > 0.
    """
    loss = keep(loss, mask)
    if mode == "token-mean":
        return loss.sum(), _count(mask, loss)
    sequences = _count(last_tokens(mask, segment_ids), loss)
    match mode:
        case "seq-mean-token-sum":
            return loss.sum(), sequences
        case "seq-mean-token-mean":
            lengths = segment_sum(jnp.ones_like(loss), mask, segment_ids)
            return (loss / jnp.maximum(lengths, 1)).sum(), sequences
        case "seq-mean-token-sum-norm":
            if norm_length is None or norm_length <= 0:
                raise ValueError(f"norm_length = {norm_length}: seq-mean-token-sum-norm needs a length > 0")
            return loss.sum() / norm_length, sequences
    raise ValueError(
        f"loss aggregation {mode!r}: valid are token-mean, seq-mean-token-sum, seq-mean-token-mean and "
        "seq-mean-token-sum-norm"
    )


def explained_variance(
    values: Float[Array, "*batch T"], returns: Float[Array, "*batch T"], mask: Bool[Array, "*batch T"]
) -> Float[Array, ""]:
    """1 - Var(R - V) / (Var(R) + 1e-5) over the mask: 1 is perfect, 0 no better than a constant."""
    values, returns = keep(values, mask), keep(returns, mask)
    return 1 - masked_variance(returns - values, mask) / (masked_variance(returns, mask) + 1e-5)


def _count(flags: Bool[Array, "*batch T"], like: Float[Array, "*batch T"]) -> Float[Array, ""]:
    return flags.sum().astype(like.dtype)
