"""Rewards per token, and generalised advantage estimation over packed rows."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxppo.rl.masked import keep
from jaxppo.rl.segments import backward_recurrence, continues, last_tokens


def token_rewards(
    scores: Float[Array, "*batch T"],
    kl: Float[Array, "*batch T"],
    coef: ArrayLike,
    mask: Bool[Array, "*batch T"],
    segment_ids: Int[Array, "*batch T"],
) -> Float[Array, "*batch T"]:
    """r_t = [t is the last masked-in token of its segment] · score - coef · kl_t inside the mask, 0 outside.

    `scores` holds each segment's score at all of its tokens. A segment without masked-in tokens has none.
    """
    score = keep(scores, last_tokens(mask, segment_ids))
    return jnp.where(mask, score - coef * keep(kl, mask), 0)


def gae(
    rewards: Float[Array, "*batch T"],
    values: Float[Array, "*batch T"],
    mask: Bool[Array, "*batch T"],
    segment_ids: Int[Array, "*batch T"],
    *,
    gamma: ArrayLike,
    lam: ArrayLike,
) -> tuple[Float[Array, "*batch T"], Float[Array, "*batch T"]]:
    """Advantages (raw, not whitened) and returns; both 0 outside the mask. Schulman et al. 2016, equation 16.

        δ_t = r_t + γ V_next(t) - V_t        A_t = δ_t + γ λ A_next(t)        R_t = A_t + V_t

    next(t) is the next masked-in token of the same segment: what lies between (a tool's tokens, say) is
    skipped without any discount. After a segment's last one V and A are 0: nothing is bootstrapped past the
    end.
    """
    rewards, values = keep(rewards, mask), keep(values, mask)
    inside = continues(segment_ids)
    # The value that the token before sees: one's own, or outside the mask the one that is passed on.
    seen = backward_recurrence((inside & ~mask).astype(values.dtype), values)
    next_values = jnp.where(inside, jnp.roll(seen, -1, axis=-1), 0)
    deltas = keep(rewards + gamma * next_values - values, mask)
    decay = jnp.where(inside, jnp.where(mask, gamma * lam, 1), 0).astype(values.dtype)
    advantages = keep(backward_recurrence(decay, deltas), mask)
    return advantages, keep(advantages + values, mask)
