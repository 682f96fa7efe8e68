"""Sums, means and whitening over the tokens of a mask.

The mask is applied by `where`: 0 · NaN is NaN, so a multiplication would let what lies outside in.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxppo.rl.segments import backward_recurrence, continues, starts


def full_precision(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x in float32, or as it is in float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def keep(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x in full precision inside the mask, 0 outside, with a gradient of exactly 0 there."""
    return jnp.where(mask, full_precision(x), 0)


def masked_sum(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Σ x over the mask."""
    return keep(x, mask).sum()


def masked_mean(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Σ x / n over the n tokens of the mask; 0 for an empty one."""
    return masked_sum(x, mask) / jnp.maximum(mask.sum(), 1)


def masked_variance(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Σ (x - mean)² / (n - 1) over the mask (Bessel); exactly 0 for equal values and for fewer than two."""
    x = full_precision(x)
    squares = masked_sum(jnp.square(keep(x, mask) - masked_mean(x, mask)), mask)
    return jnp.where(_spread(x, mask) == 0, 0, squares / jnp.maximum(mask.sum() - 1, 1))


def whiten(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """(x - mean) / √(variance + 1e-8) over the whole mask, 0 outside it.

    The variance has Bessel's correction. Fewer than two tokens have none: they stay as they are. Equal ones
    give zeros. The sums run over all of x, whatever devices hold it.
    """
    x = keep(x, mask)
    white = (x - masked_mean(x, mask)) * jax.lax.rsqrt(masked_variance(x, mask) + 1e-8)
    # The rounding of the mean, divided by √1e-8, would otherwise stand for equal values.
    white = jnp.where(_spread(x, mask) == 0, 0, white)
    return jnp.where(mask, jnp.where(mask.sum() < 2, x, white), 0)


def segment_sum(
    x: Float[Array, "*batch T"], mask: Bool[Array, "*batch T"], segment_ids: Int[Array, "*batch T"]
) -> Float[Array, "*batch T"]:
    """Each token gets Σ x over the masked-in tokens of its own segment; padding gets 0.

    Example: x = 1 2 3 4, mask = F T T T, segment_ids = 1 1 1 0 gives 5 5 5 0.
    """
    x = keep(x, mask)
    from_here = backward_recurrence(continues(segment_ids).astype(x.dtype), x)
    return jnp.where(segment_ids != 0, jnp.take_along_axis(from_here, starts(segment_ids), axis=-1), 0)


def _spread(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """max - min over the mask; negative for an empty one."""
    return jnp.max(x, initial=-jnp.inf, where=mask) - jnp.min(x, initial=jnp.inf, where=mask)
