"""Log-probability and entropy of each response token, in chunks: [tokens, vocabulary] never exists at once.

Only the tokens in the batch's mask are computed: each row brings them to its front, and the loop over chunks ends
with the last of them. Its gradient is written out, so that the backward pass too holds one chunk of logits, multiplies
in the model's dtype, and adds the head's gradient up in float32.
"""

from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxppo.models.attention import precision_of
from jaxppo.models.layers import wide
from jaxppo.models.parameters import Params
from jaxppo.models.transformer import Model

CHUNK_BYTES = 2 << 30


@runtime_checkable
class TokenRows(Protocol):
    """Rows of tokens [B, T]: a packed microbatch."""

    @property
    def tokens(self) -> jax.Array: ...
    @property
    def positions(self) -> jax.Array: ...
    @property
    def segment_ids(self) -> jax.Array: ...
    @property
    def mask(self) -> jax.Array: ...


def shift_right(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """What the model says at t - 1 belongs to the token at t: the one place where that shift is made; 0 off the mask.

    A sequence starts with a prompt token, so a token in the mask always follows one of its own sequence.
    """
    return jnp.where(mask, jnp.pad(x[:, :-1], ((0, 0), (1, 0))), 0)


def token_logprobs(
    model: Model, params: Params, batch: TokenRows, temperature: float, *, chunk_bytes: int = CHUNK_BYTES
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log p(token t | before), entropy of the distribution it was drawn from), nats, float32, 0 off the mask.

    p = softmax(logits / temperature). `chunk_bytes` bounds one device's chunk of float32 logits.
    """
    hidden = model.forward(params, batch.tokens, batch.positions, batch.segment_ids)
    rows, length = batch.tokens.shape
    chunks = num_chunks(rows, length, model.config.vocab_size, model.row_shards, chunk_bytes)
    targets, predicted = (jnp.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (batch.tokens, batch.mask))
    order = jnp.argsort(~predicted, axis=1, stable=True)
    chunk = length // chunks
    trips = -(-jnp.max(jnp.sum(predicted, axis=1)) // chunk)
    found: Any = head_logprobs(model, temperature, chunk, hidden, model.head(params), targets, order, trips)
    logp, entropy = found
    return shift_right(logp, batch.mask), shift_right(entropy, batch.mask)


def num_chunks(rows: int, length: int, vocab: int, row_shards: int, chunk_bytes: int) -> int:
    """The fewest equal chunks of a row's tokens whose float32 logits take at most `chunk_bytes` on a device."""
    needed = -(-rows * length * vocab * 4 // (row_shards * chunk_bytes))
    return next((n for n in range(max(needed, 1), length) if length % n == 0), length)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def head_logprobs(
    model: Model,
    temperature: float,
    chunk: int,
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    order: Int[Array, "B T"],
    trips: Int[Array, ""],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log p(target), entropy) of p = softmax(hidden · head / temperature) at the first trips · chunk tokens of each
    row's `order`, 0 at the others."""
    weights = head.astype(model.dtype)

    def body(i: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
        at, h, target = _chunk(i, chunk, order, hidden, targets)
        logits, log_z = _logits(model, temperature, h, weights)
        logp = jnp.sum(jnp.where(_is_target(logits, target), logits, 0), axis=-1) - log_z
        entropy = log_z - jnp.sum(jnp.exp(logits - log_z[..., None]) * logits, axis=-1)
        row = jnp.arange(at.shape[0])[:, None]
        return out[0].at[row, at].set(logp), out[1].at[row, at].set(entropy)

    zeros = jnp.zeros(targets.shape, wide(hidden[:0]).dtype)
    return jax.lax.fori_loop(0, trips, body, (zeros, zeros))


def _forward(model: Model, temperature: float, chunk: int, *inputs: Array) -> tuple:
    return head_logprobs(model, temperature, chunk, *inputs), inputs


def _backward(model: Model, temperature: float, chunk: int, inputs: tuple, gradients: tuple) -> tuple:
    """d log p_y / dz = [y] - p and dH / dz = -p (log p + H), z = logits / temperature."""
    hidden, head, targets, order, trips = inputs
    weights = head.astype(model.dtype)
    precision, exact = precision_of(hidden), wide(hidden[:0]).dtype

    def body(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        at, h, target, g_logp, g_entropy = _chunk(i, chunk, order, hidden, targets, *gradients)
        logits, log_z = _logits(model, temperature, h, weights)
        log_p = logits - log_z[..., None]
        p = jnp.exp(log_p)
        entropy = -jnp.sum(p * log_p, axis=-1, keepdims=True)
        dz = jnp.where(_is_target(logits, target), g_logp[..., None], 0) - p * (
            g_logp[..., None] + g_entropy[..., None] * (log_p + entropy)
        )
        dz = (dz / temperature).astype(model.dtype)
        dh = jnp.einsum("btv,vd->btd", dz, weights, precision=precision)
        dw = jnp.einsum("btv,btd->vd", dz, h, precision=precision, preferred_element_type=exact)
        row = jnp.arange(at.shape[0])[:, None]
        return sums[0].at[row, at].set(dh), sums[1] + dw

    zeros = jnp.zeros_like(hidden), jnp.zeros(head.shape, exact)
    d_hidden, d_head = jax.lax.fori_loop(0, trips, body, zeros)
    return d_hidden, d_head.astype(head.dtype), None, None, None


head_logprobs.defvjp(_forward, _backward)


def _chunk(i: Array, chunk: int, order: Int[Array, "B T"], *arrays: Array) -> tuple[Array, ...]:
    """Places of chunk i in each row, and the arrays [B, T, ...] there."""
    at = jax.lax.dynamic_slice_in_dim(order, i * chunk, chunk, axis=1)
    row = jnp.arange(at.shape[0])[:, None]
    return at, *(x[row, at] for x in arrays)


def _logits(model: Model, temperature: float, hidden: Array, weights: Array) -> tuple[Array, Array]:
    """Tempered logits [B, C, V] and their logsumexp."""
    logits = model.logits(hidden, weights) / temperature
    logits = model.constrain(logits, ("batch", "seq", "vocab"))
    return logits, jax.nn.logsumexp(logits, axis=-1)


def _is_target(logits: Float[Array, "B C V"], target: Int[Array, "B C"]) -> Bool[Array, "B C V"]:
    """A comparison, not a gather: it stays on the device that holds its part of the vocabulary."""
    return jnp.arange(logits.shape[-1]) == target[..., None]
