"""Truncated importance weights, and rejection: an engine never samples from quite the policy that is trained.

Kernels, dtypes and top-p make log π_train(token) differ from log π_rollout(token), so a gradient estimated on the
engine's tokens is biased. Weighting by π_train / π_rollout removes the bias, the cap bounds the variance. Off
policy by engine, not by age: the ratio of the clipped loss is a separate one. Source: Yao et al., "Your Efficient
RL Framework Secretly Brings You Off-Policy RL Training", 2025.
"""

import math

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


def accepted(
    train_logp: Float[Array, "*batch T"],
    rollout_logp: Float[Array, "*batch T"],
    mask: Bool[Array, "*batch T"],
    segment_ids: Int[Array, "*batch T"],
    *,
    kind: str,
    lower: float,
    upper: float,
) -> Bool[Array, "*batch T"]:
    """The tokens of the mask that stay, where engine and trainer agree well enough. With r = train - rollout, ±20:

        k1  -r, from log(lower) to log(upper)      k2  r² / 2, up to upper      k3  eʳ - 1 - r, up to upper

    `kind` is token_K (each token by itself), or seq_sum_K, seq_mean_K, seq_max_K (a whole sequence by its sum, mean or
    greatest; max is of k2 and k3). Bounds belong to what is accepted. Raises ValueError for another kind.
    Source: verl's rejection sampling; MIS (Liu et al. 2025).
    """
    r = jnp.clip(keep(train_logp, mask) - keep(rollout_logp, mask), -20, 20)
    level, _, estimator = kind.rpartition("_")
    statistics = {"k1": -r, "k2": jnp.square(r) / 2, "k3": jnp.expm1(r) - r}
    if estimator not in statistics or level not in ("token", "seq_sum", "seq_mean", "seq_max") or kind == "seq_max_k1":
        raise ValueError(
            f"rejection kind {kind!r}: valid are token, seq_sum, seq_mean and seq_max with _k1, _k2 or _k3"
        )
    x = statistics[estimator]
    low, high = (math.log(lower), math.log(upper)) if estimator == "k1" else (-math.inf, upper)
    if level in ("seq_sum", "seq_mean"):
        x = segment_sum(x, mask, segment_ids)
        if level == "seq_mean":
            x = x / jnp.maximum(segment_sum(jnp.ones_like(x), mask, segment_ids), 1)
    within = (low <= x) & (x <= high)
    if level == "seq_max":
        within = segment_sum((~within).astype(x.dtype), mask, segment_ids) == 0
    return mask & within
