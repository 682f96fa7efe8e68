"""Attention of one new token per sequence over its cached keys and values, each sequence up to its own length.

`xla` computes the whole cache and masks it; the kernel (Pallas, through Triton, on a GPU) reads no further than a
sequence is long: decoding is bound by the bytes it reads.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxppo.models.attention import Implementation, masked_attention

BLOCK = 64
"""Cached tokens that the kernel reads at a time: a cache's length is a multiple of it."""
MIN_QUERIES = 16
"""Rows of the smallest matrix product of a tensor core."""


def decode_attention(
    q: Float[Array, "S H K"],
    k: Float[Array, "S N G K"],
    v: Float[Array, "S N G K"],
    lengths: Int[Array, " S"],
    implementation: Implementation,
    interpret: bool = False,
) -> Float[Array, "S H K"]:
    """softmax(q k / √K) v over the first lengths[s] tokens of slot s; a slot of length 0 gives finite values.

    Each of the G key heads serves H / G queries. `interpret` runs the kernel's text on any backend.
    """
    if implementation == "xla":
        visible = jnp.arange(k.shape[1]) < jnp.maximum(lengths, 1)[:, None]
        return masked_attention(q[:, None], k, v, visible[:, None])[:, 0]
    slots, heads, size = q.shape
    groups = k.shape[2]
    queries = heads // groups
    rows = max(MIN_QUERIES, pl.next_power_of_2(queries))
    grouped = jnp.pad(q.reshape(slots, groups, queries, size), ((0, 0), (0, 0), (0, rows - queries), (0, 0)))
    out = pl.pallas_call(
        partial(_kernel, scale=size**-0.5),
        grid=(slots, groups),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, q.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="decode_attention",
    )(lengths, grouped, k, v)
    return out[:, :, :queries].reshape(q.shape)


def _kernel(lengths: Any, q: Any, k: Any, v: Any, out: Any, *, scale: float) -> None:
    """One slot's queries of one key head: the softmax is carried over blocks (Milakov & Gimelshein 2018)."""
    slot, group = pl.program_id(0), pl.program_id(1)
    length = triton.load(lengths.at[slot])
    queries = triton.load(q.at[slot, group])

    def block(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        mixed, top, total = carry
        inside = i * BLOCK + jnp.arange(BLOCK) < length
        at = (slot, pl.ds(i * BLOCK, BLOCK), group)
        keys = triton.load(k.at[at], mask=inside[:, None], other=0)
        values = triton.load(v.at[at], mask=inside[:, None], other=0)
        scores = jnp.where(inside, triton.dot(queries, keys.T) * scale, -jnp.inf)
        higher = jnp.maximum(top, scores.max(axis=-1))
        weights, fade = jnp.exp(scores - higher[:, None]), jnp.exp(top - higher)
        mixed = mixed * fade[:, None] + triton.dot(weights.astype(values.dtype), values)
        return mixed, higher, total * fade + weights.sum(axis=-1)

    rows = queries.shape[0]
    start = jnp.zeros(queries.shape, jnp.float32), jnp.full(rows, -1e30, jnp.float32), jnp.zeros(rows, jnp.float32)
    mixed, _, total = jax.lax.fori_loop(0, pl.cdiv(length, BLOCK), block, start)
    triton.store(out.at[slot, group], (mixed / jnp.maximum(total, 1e-30)[:, None]).astype(out.dtype))
