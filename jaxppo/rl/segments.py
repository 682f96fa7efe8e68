"""Recurrences that stop at the boundaries of packed sequences, in log(T) depth.

A segment is a run of adjacent equal ids in a row; id 0 is padding. A scan adds in one fixed order, unlike a
GPU's scatter-add, so that the same batch gives the same bits.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


def continues(segment_ids: Int[Array, "*batch T"]) -> Bool[Array, "*batch T"]:
    """Whether token t + 1 belongs to the segment of token t; False at padding and at a row's last token."""
    same = (segment_ids[..., :-1] == segment_ids[..., 1:]) & (segment_ids[..., :-1] != 0)
    return jnp.concatenate([same, jnp.zeros_like(same, shape=(*segment_ids.shape[:-1], 1))], axis=-1)


def starts(segment_ids: Int[Array, "*batch T"]) -> Int[Array, "*batch T"]:
    """Index of the first token of each token's segment (of its run of zeros, at padding)."""
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    first = jnp.concatenate([jnp.ones_like(changes, shape=(*segment_ids.shape[:-1], 1)), changes], axis=-1)
    return jax.lax.cummax(jnp.where(first, jnp.arange(segment_ids.shape[-1]), 0), axis=segment_ids.ndim - 1)


def backward_recurrence(
    decay: Shaped[Array, "*batch T"], increment: Shaped[Array, "*batch T"]
) -> Shaped[Array, "*batch T"]:
    """y_t = increment_t + decay_t · y_{t+1} with y_T = 0; a decay of 0 cuts the row there."""

    def join(later, earlier):
        decay_later, y_later = later
        decay_earlier, y_earlier = earlier
        return decay_earlier * decay_later, y_earlier + decay_earlier * y_later

    return jax.lax.associative_scan(join, (decay, increment), reverse=True, axis=decay.ndim - 1)[1]


def last_tokens(mask: Bool[Array, "*batch T"], segment_ids: Int[Array, "*batch T"]) -> Bool[Array, "*batch T"]:
    """True at the last masked-in token of each segment: one per segment that has any, none for the others."""
    mask = mask & (segment_ids != 0)
    from_here = backward_recurrence(continues(segment_ids).astype(jnp.int32), mask.astype(jnp.int32))
    return mask & (from_here == 1)
