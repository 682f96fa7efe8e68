"""Causal attention of packed rows: token t sees the tokens of its own segment up to t.

`xla` writes the [T, T] scores and runs anywhere: it is the reference. `cudnn_packed` never does, and needs a GPU.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxppo.config import UserError
from jaxppo.models.layers import wide

Implementation = Literal["auto", "cudnn_packed", "xla"]


def resolve(implementation: Implementation, backend: str) -> Implementation:
    """What "auto" means on a backend."""
    if implementation != "auto":
        return implementation
    return "cudnn_packed" if backend in ("gpu", "cuda") else "xla"


def packed_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    segment_ids: Int[Array, "B T"],
    implementation: Implementation,
) -> Float[Array, "B T H K"]:
    """softmax(q k / √K) v over each token's own segment and past; each of the G key heads serves H / G queries.

    Padding (segment 0) attends to padding, so that its values are finite. Raises UserError where the
    implementation does not apply.
    """
    if implementation == "xla":
        rows, columns = segment_ids[:, :, None], segment_ids[:, None, :]
        causal = jnp.tril(jnp.ones((segment_ids.shape[1],) * 2, bool))
        return masked_attention(q, k, v, (rows == columns) & causal)
    if implementation == "cudnn_packed":
        from jaxppo.models.cudnn import cudnn_packed_attention

        return cudnn_packed_attention(q, k, v, segment_ids)
    raise UserError(f"model.attention = {implementation!r}: valid ones are auto, cudnn_packed, xla")


def masked_attention(
    q: Float[Array, "B Q H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    visible: Bool[Array, "B Q T"],
) -> Float[Array, "B Q H K"]:
    """Attention with the scores in memory, softmax in float32; every query must see at least one key."""
    batch, queries, heads, size = q.shape
    groups = k.shape[2]
    grouped = q.reshape(batch, queries, groups, heads // groups, size)
    precision = precision_of(q)
    scores = jnp.einsum("bqghk,btgk->bghqt", grouped, k, precision=precision, preferred_element_type=wide(q[:0]).dtype)
    scores = jnp.where(visible[:, None, None], scores * size**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bghqt,btgk->bqghk", weights, v, precision=precision).reshape(q.shape)


def precision_of(x: Array) -> jax.lax.Precision | None:
    """Full products for float32 and wider, where a GPU would otherwise round them to TF32."""
    return None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
