"""Truncated importance weights: what an engine sampled from is never quite the policy that the trainer scores.

Kernels, dtypes and top-p make log π_train(token) differ from log π_rollout(token), so a gradient estimated on the
engine's tokens is biased. Weighting by π_train / π_rollout removes the bias, the cap bounds the variance. Off
policy by engine, not by age: the ratio of the clipped loss is a separate one. Source: Yao et al., "Your Efficient
RL Framework Secretly Brings You Off-Policy RL Training", 2025.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxppo.rl.masked import keep, segment_sum


def importance_weights(
    train_logp: Float[Array, "*batch T"],
    rollout_logp: Float[Array, "*batch T"],
    mask: Bool[Array, "*batch T"],
    segment_ids: Int[Array, "*batch T"],
    *,
    level: str,
    cap: float,
) -> Float[Array, "*batch T"]:
    """min(exp(d), cap), constant under differentiation; 0 outside the mask. With r = train_logp - rollout_logp:

        "token"      d[t] = r[t]
        "sequence"   d[t] = Σ r over the masked-in tokens of t's segment: one weight for the whole sequence

    d is bounded to ±20 before exp. Example: r = [log 1.5, log 3] in one segment with cap 2 gives [1.5, 2] by token
    and [2, 2] by sequence. Raises ValueError for another level or a cap that is not positive.
    """
    if not cap > 0:
        raise ValueError(f"cap = {cap}: must be a number > 0")
    log_ratio = keep(train_logp, mask) - keep(rollout_logp, mask)
    match level:
        case "token":
            exponent = log_ratio
        case "sequence":
            exponent = segment_sum(log_ratio, mask, segment_ids)
        case _:
            raise ValueError(f"level {level!r}: valid are token, sequence")
    weights = jnp.minimum(jnp.exp(jnp.clip(exponent, -20, 20)), cap)
    return jax.lax.stop_gradient(jnp.where(mask, weights, 0))
