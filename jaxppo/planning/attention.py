"""A stand-in for the GPU's attention kernel where programs are compiled on a CPU: its memory profile, in pure lax.

It keeps what the kernel keeps for the backward pass (q, k, v, the output and one logsumexp per query) and never holds
more than BLOCK queries' scores. `counting` knows its two functions by their names.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 32


@jax.custom_vjp
def blockwise_attention(
    q: Float[Array, "B T H K"], k: Float[Array, "B T G K"], v: Float[Array, "B T G K"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T H K"]:
    """packed_attention, row by row and block by block of queries."""
    return kernel_forward(q, k, v, segment_ids)[0]


def _forward(q: Array, k: Array, v: Array, segment_ids: Array) -> tuple[Array, tuple]:
    out, log_z = kernel_forward(q, k, v, segment_ids)
    return out, (q, k, v, segment_ids, out, log_z)


@jax.jit
def kernel_forward(q: Array, k: Array, v: Array, segment_ids: Array) -> tuple[Array, Array]:
    """(output [B, T, H, K], logsumexp of each query's scores [B, T, H])."""

    def row(arrays: tuple) -> tuple[Array, Array]:
        q, k, v, ids = arrays
        q, at, rows = _blocks(q), _blocks(jnp.arange(len(ids))), _blocks(ids)

        def block(arrays: tuple) -> tuple[Array, Array]:
            q, at, rows = arrays
            scores = _scores(q, at, rows, k, ids)
            log_z = jax.nn.logsumexp(scores, axis=-1)
            weights = jnp.exp(scores - log_z[..., None]).astype(v.dtype)
            return _flat(jnp.einsum("qght,tgk->qghk", weights, v)), log_z.reshape(log_z.shape[0], -1)

        out, log_z = jax.lax.map(block, (q, at, rows))
        return out.reshape(-1, *out.shape[2:]), log_z.reshape(-1, log_z.shape[-1])

    return jax.lax.map(row, (q, k, v, segment_ids))


@jax.jit
def kernel_backward(saved: tuple, gradient: Array) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v; the scores are computed again, as the kernel does."""

    def row(arrays: tuple) -> tuple[Array, Array, Array]:
        q, k, v, ids, out, log_z, d_out = arrays
        through = jnp.sum(out.astype(jnp.float32) * d_out, axis=-1)
        split = tuple(map(_blocks, (q, jnp.arange(len(ids)), ids, log_z, d_out, through)))

        def block(sums: tuple[Array, Array], arrays: tuple) -> tuple[tuple[Array, Array], Array]:
            q, at, rows, log_z, d_out, through = arrays
            grouped = partial(_grouped, heads=k.shape[1])
            weights = jnp.exp(_scores(q, at, rows, k, ids) - grouped(log_z)[..., None])
            d_weights = jnp.einsum("qghk,tgk->qght", grouped(d_out), v)
            d_scores = (weights * (d_weights - grouped(through)[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
            d_k = sums[0] + jnp.einsum("qght,qghk->tgk", d_scores, grouped(q))
            d_v = sums[1] + jnp.einsum("qght,qghk->tgk", weights.astype(q.dtype), grouped(d_out))
            return (d_k, d_v), _flat(jnp.einsum("qght,tgk->qghk", d_scores, k))

        zeros = jnp.zeros(k.shape, jnp.promote_types(k.dtype, jnp.float32))
        (d_k, d_v), d_q = jax.lax.scan(block, (zeros, zeros), split)
        return d_q.reshape(q.shape).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)

    return jax.lax.map(row, (*saved, gradient))


def _backward(saved: tuple, gradient: Array) -> tuple:
    return *kernel_backward(saved, gradient), None


blockwise_attention.defvjp(_forward, _backward)


def _blocks(x: Array) -> Array:
    """[T, ...] -> [blocks, at most BLOCK, ...]."""
    size = next(n for n in range(BLOCK, 0, -1) if len(x) % n == 0)
    return x.reshape(-1, size, *x.shape[1:])


def _grouped(x: Array, heads: int) -> Array:
    """[Q, H, ...] -> [Q, G, H / G, ...]."""
    return x.reshape(x.shape[0], heads, -1, *x.shape[2:])


def _flat(x: Array) -> Array:
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _scores(q: Array, at: Array, rows: Array, k: Array, ids: Array) -> Float[Array, "Q G h T"]:
    """Scaled scores of a block of queries, float32; -inf where a key is later or of another segment."""
    scores = jnp.einsum("qghk,tgk->qght", _grouped(q, k.shape[1]), k, preferred_element_type=jnp.float32)
    visible = (rows[:, None] == ids) & (at[:, None] >= jnp.arange(len(ids)))
    return jnp.where(visible[:, None, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
