"""Statistics over elements that share an id, wherever in the batch they stand: sorted together, a group is a segment.

Arrays are [N]. An id below 0 names no group: such elements count nowhere and get 0. Neither the order of the elements
nor the devices that hold them play a part, beyond rounding.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxppo.rl.masked import full_precision, segment_sum
from jaxppo.rl.segments import starts


def group_sum(x: Float[Array, " N"], ids: Int[Array, " N"]) -> Float[Array, " N"]:
    """Each element gets Σ x over its group. Example: x = 1 2 3 4, ids = 7 5 7 -1 gives 4 2 4 0."""
    order = jnp.argsort(ids)
    segments = jnp.maximum(ids[order] + 1, 0)
    return _unsort(segment_sum(x[order], segments > 0, segments), order)


def group_size(ids: Int[Array, " N"]) -> Float[Array, " N"]:
    """Elements of each one's group."""
    return group_sum(jnp.ones(ids.shape), ids)


def group_mean(x: Float[Array, " N"], ids: Int[Array, " N"]) -> Float[Array, " N"]:
    """Each element gets the mean of its group; exactly x where all of the group are equal."""
    order = jnp.argsort(ids)
    first = _unsort(full_precision(x)[order][starts(ids[order])], order)
    mean = first + group_sum(x - first, ids) / jnp.maximum(group_size(ids), 1)
    return jnp.where(ids < 0, 0, mean)


def group_std(x: Float[Array, " N"], ids: Int[Array, " N"]) -> Float[Array, " N"]:
    """√(Σ (x - mean)² / (n - 1)) of each element's group (Bessel); 0 for a group of one, and of equals."""
    squares = group_sum(jnp.square(x - group_mean(x, ids)), ids)
    variance = squares / jnp.maximum(group_size(ids) - 1, 1)
    # the square root has no gradient at 0
    return jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)


def lead_over_group(x: Float[Array, " N"], ids: Int[Array, " N"]) -> Float[Array, " N"]:
    """A group's greatest element gets its distance to the second; the others, and equals at the top, get 0."""
    x = full_precision(x)
    order = jnp.lexsort((-x, ids))
    ranked, groups = x[order], ids[order]
    is_best = (starts(groups) == jnp.arange(len(ids))) & (groups >= 0)
    has_second = jnp.append(groups[1:] == groups[:-1], False)
    return _unsort(jnp.where(is_best & has_second, ranked - jnp.roll(ranked, -1), 0), order)


def pair_ids(a: Int[Array, " N"], b: Int[Array, " N"]) -> Int[Array, " N"]:
    """One id for each distinct pair; below 0 where `a` is. Example: a = 3 3 1 -1, b = 8 8 8 8 gives 2 2 1 -1."""
    order = jnp.lexsort((b, a))
    a_sorted, b_sorted = a[order], b[order]
    changes = (a_sorted[1:] != a_sorted[:-1]) | (b_sorted[1:] != b_sorted[:-1])
    ids = _unsort(jnp.cumsum(jnp.insert(changes, 0, False).astype(jnp.int32)), order)
    return jnp.where(a < 0, -1, ids)


def _unsort(x: Array, order: Int[Array, " N"]) -> Array:
    return jnp.zeros_like(x).at[order].set(x, unique_indices=True)
