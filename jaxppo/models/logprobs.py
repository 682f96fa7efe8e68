"""Log-probability and entropy of each token, in chunks: [tokens, vocabulary] never exists at once."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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


def shift_right(x: Float[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """What the model says at t - 1 belongs to the token at t: the one place where that shift is made.

    0 at the first token of each segment and at padding.
    """
    previous = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    follows = (segment_ids == previous) & (segment_ids != 0)
    return jnp.where(follows, jnp.pad(x[:, :-1], ((0, 0), (1, 0))), 0)


def token_logprobs(
    model: Model, params: Params, batch: TokenRows, temperature: float, *, chunk_bytes: int = CHUNK_BYTES
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log p(token t | before), entropy of the distribution it was drawn from), nats, float32.

    p = softmax(logits / temperature). `chunk_bytes` bounds one device's chunk of float32 logits.
    """
    hidden = model.forward(params, batch.tokens, batch.positions, batch.segment_ids)
    rows, length = batch.tokens.shape
    targets = jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))
    chunks = num_chunks(rows, length, model.config.vocab_size, model.row_shards, chunk_bytes)

    @jax.checkpoint
    def chunk(hidden_chunk: Array, target_chunk: Array) -> tuple[Array, Array]:
        logits = model.unembed(params, hidden_chunk) / temperature
        logits = model.constrain(logits, ("batch", "seq", "vocab"))
        log_z = jax.nn.logsumexp(logits, axis=-1)
        logp = jnp.take_along_axis(logits, target_chunk[..., None], axis=-1)[..., 0] - log_z
        entropy = log_z - jnp.sum(jnp.exp(logits - log_z[..., None]) * logits, axis=-1)
        return logp, entropy

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(rows, chunks, length // chunks, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(rows, length)

    logp, entropy = jax.lax.map(lambda c: chunk(*c), (split(hidden), split(targets)))
    return shift_right(join(logp), batch.segment_ids), shift_right(join(wide(entropy)), batch.segment_ids)


def num_chunks(rows: int, length: int, vocab: int, row_shards: int, chunk_bytes: int) -> int:
    """The fewest equal chunks of a row's tokens whose float32 logits take at most `chunk_bytes` on a device."""
    needed = -(-rows * length * vocab * 4 // (row_shards * chunk_bytes))
    return next((n for n in range(max(needed, 1), length) if length % n == 0), length)
