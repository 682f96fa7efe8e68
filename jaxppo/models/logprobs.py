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
HEAD_AXES = ("vocab", "embed")


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
    targets, predicted = (jnp.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (batch.tokens, batch.mask))
    device = model.per_device()

    def spread(hidden: Array, head: Array, targets: Array, predicted: Array) -> tuple[Array, Array]:
        """A device's rows; under context parallelism a row is its own part of one."""
        rows, length = targets.shape
        chunk = length // num_chunks(rows, length, head.shape[0], chunk_bytes)
        order = jnp.argsort(~predicted, axis=1, stable=True)
        trips = device.collectives.most(-(-jnp.max(jnp.sum(predicted, axis=1)) // chunk))
        hidden = device.collectives.enter(hidden)
        found: Any = head_logprobs(device, temperature, chunk, hidden, head, targets, order, trips)
        return found

    inside = ("batch", "seq_inside")
    inputs = ("batch", "seq_between", None), HEAD_AXES, inside, inside
    arrays = hidden, model.head(params), targets, predicted
    found = model.mesh.spread(spread, inputs, (inside, inside))(*arrays)
    logp, entropy = (model.constrain(x, ("batch", "seq")) for x in found)
    return shift_right(logp, batch.mask), shift_right(entropy, batch.mask)


def num_chunks(rows: int, length: int, vocab: int, chunk_bytes: int) -> int:
    """The fewest equal chunks of a row's tokens whose float32 logits take at most `chunk_bytes`."""
    needed = -(-rows * length * vocab * 4 // chunk_bytes)
    return next((n for n in range(max(needed, 1), length) if length % n == 0), length)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def head_logprobs(
    model: Model,
    temperature: float,
    chunk: int,
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V d"],
    targets: Int[Array, "B T"],
    order: Int[Array, "B T"],
    trips: Int[Array, ""],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log p(target), entropy) of p = softmax(hidden · head / temperature) at the first trips · chunk tokens of each
    row's `order`, 0 at the others. All arrays are a device's own parts, the head's too."""
    between = model.collectives
    weights = between.gather(head.astype(model.dtype), HEAD_AXES)

    def body(i: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
        at, h, target = _chunk(i, chunk, order, hidden, targets)
        logits, log_z = _logits(model, temperature, h, weights)
        of_target = jnp.sum(jnp.where(_is_target(model, logits, target), logits, 0), axis=-1)
        mean_logit = jnp.sum(jnp.exp(logits - log_z[..., None]) * logits, axis=-1)
        logp, entropy = between.vocab_sum(of_target) - log_z, log_z - between.vocab_sum(mean_logit)
        row = jnp.arange(at.shape[0])[:, None]
        return out[0].at[row, at].set(logp), out[1].at[row, at].set(entropy)

    zeros = jnp.zeros(targets.shape, wide(hidden[:0]).dtype)
    return jax.lax.fori_loop(0, trips, body, (zeros, zeros))


def _forward(model: Model, temperature: float, chunk: int, *inputs: Array) -> tuple:
    return head_logprobs(model, temperature, chunk, *inputs), inputs


def _backward(model: Model, temperature: float, chunk: int, inputs: tuple, gradients: tuple) -> tuple:
    """d log p_y / dz = [y] - p and dH / dz = -p (log p + H), z = logits / temperature."""
    hidden, head, targets, order, trips = inputs
    between = model.collectives
    weights = between.gather(head.astype(model.dtype), HEAD_AXES)
    # devices of one vocabulary share the log-probabilities, and each was given its share of their gradients
    gradients = tuple(between.vocab_sum(g) for g in gradients)
    precision, exact = precision_of(hidden), wide(hidden[:0]).dtype

    def body(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        at, h, target, g_logp, g_entropy = _chunk(i, chunk, order, hidden, targets, *gradients)
        logits, log_z = _logits(model, temperature, h, weights)
        log_p = logits - log_z[..., None]
        p = jnp.exp(log_p)
        entropy = -between.vocab_sum(jnp.sum(p * log_p, axis=-1, keepdims=True))
        dz = jnp.where(_is_target(model, logits, target), g_logp[..., None], 0) - p * (
            g_logp[..., None] + g_entropy[..., None] * (log_p + entropy)
        )
        dz = (dz / temperature).astype(model.dtype)
        dh = jnp.einsum("btv,vd->btd", dz, weights, precision=precision)
        dw = jnp.einsum("btv,btd->vd", dz, h, precision=precision, preferred_element_type=exact)
        row = jnp.arange(at.shape[0])[:, None]
        return sums[0].at[row, at].set(dh), sums[1] + dw

    zeros = jnp.zeros_like(hidden), jnp.zeros(weights.shape, exact)
    d_hidden, d_head = jax.lax.fori_loop(0, trips, body, zeros)
    return d_hidden, between.scatter(d_head, HEAD_AXES).astype(head.dtype), None, None, None


head_logprobs.defvjp(_forward, _backward)


def _chunk(i: Array, chunk: int, order: Int[Array, "B T"], *arrays: Array) -> tuple[Array, ...]:
    """Places of chunk i in each row, and the arrays [B, T, ...] there."""
    at = jax.lax.dynamic_slice_in_dim(order, i * chunk, chunk, axis=1)
    row = jnp.arange(at.shape[0])[:, None]
    return at, *(x[row, at] for x in arrays)


def _logits(model: Model, temperature: float, hidden: Array, weights: Array) -> tuple[Array, Array]:
    """Tempered logits [B, C, V], of the device's part of the vocabulary, and the whole one's logsumexp."""
    logits = model.logits(hidden, weights) / temperature
    return logits, model.collectives.vocab_logsumexp(logits)


def _is_target(model: Model, logits: Float[Array, "B C V"], target: Int[Array, "B C"]) -> Bool[Array, "B C V"]:
    """A comparison, not a gather: it stays on the device that holds its part of the vocabulary."""
    size = logits.shape[-1]
    return model.collectives.vocab_start(size) + jnp.arange(size) == target[..., None]
