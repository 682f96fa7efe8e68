"""A test that the GPU kernels compute here what the plain formulas do, made before a run relies on them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxppo.config import UserError
from jaxppo.models.attention import Implementation, packed_attention
from jaxppo.models.decode_attention import decode_attention

TOLERANCE = 0.04
"""Of the largest element of an array: bfloat16 rounding gives about 0.01."""
ROWS = (((1, 2, 3, 0), (100, 37, 90, 29)), ((1, 2, 0), (3, 250, 3)))
"""Segment numbers and their lengths, a padded tail last."""
LENGTHS = (1, 64, 100, 256)


def verify_kernels(implementation: Implementation) -> None:
    """Raises UserError where the kernels behind `implementation` are off from xla by more than TOLERANCE.

    Values and gradients of packed rows with uneven segments and padded tails, values of decoding, grouped queries.
    """
    worst = max(packed_difference(implementation), decoding_difference(implementation))
    if not worst <= TOLERANCE:  # nor NaN
        raise UserError(
            f"model.attention = {implementation!r}: on this GPU its kernels differ from xla by {worst:.3f} of the "
            f"largest element, more than {TOLERANCE}; 'xla' is valid"
        )


def packed_difference(implementation: Implementation) -> float:
    """The largest difference of outputs and gradients, relative to the largest element of each array."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((2, 256, 8, 64), (2, 256, 2, 64), (2, 256, 2, 64), (2, 256, 8, 64))
    q, k, v, weight = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True))
    ids = jnp.stack([jnp.repeat(jnp.array(n), jnp.array(c), total_repeat_length=256) for n, c in ROWS])
    real = (ids != 0)[..., None, None]

    def loss(q: Array, k: Array, v: Array, implementation: Implementation) -> tuple[Array, Array]:
        out = jnp.where(real, packed_attention(q, k, v, ids, implementation), 0)
        return (out * weight).astype(jnp.float32).sum(), out

    gradient = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True), static_argnums=3)
    return _difference(gradient(q, k, v, implementation), gradient(q, k, v, "xla"))


def decoding_difference(implementation: Implementation, interpret: bool = False) -> float:
    """The largest difference of outputs, relative to the largest element."""
    slots, groups, size = len(LENGTHS), 2, 64
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = ((slots, 6, size), (slots, max(LENGTHS), groups, size), (slots, max(LENGTHS), groups, size))
    q, k, v = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True))
    lengths = jnp.array(LENGTHS)
    return _difference(
        decode_attention(q, k, v, lengths, implementation, interpret), decode_attention(q, k, v, lengths, "xla")
    )


def _difference(got: Array | tuple, want: Array | tuple) -> float:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
