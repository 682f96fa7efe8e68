"""The built-in engine's device program: one loop that fills free slots from a queue and decodes all slots.

S slots decode at the same time; the call's sequences (prompt i, sample j) wait in groups whose prompts are packed. A
sequence's draws depend on nothing but its own key and its own position, so neither its slot nor its company changes
its tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxppo.models import KVCache, Model
from jaxppo.rollout.sampling import sample


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a program is compiled for."""

    slots: int
    prompt_length: int
    new_tokens: int
    greedy: bool
    top_k: int
    top_p: float


@flax.struct.dataclass
class Queue:
    """The sequences of one call, padded to a fixed number; what is constant while they decode.

    Groups are `PackedPrompts`, of B rows of T tokens and up to E sequences.
    """

    tokens: Int[Array, "groups B T"]
    positions: Int[Array, "groups B T"]
    segment_ids: Int[Array, "groups B T"]
    sequences: Int[Array, "groups E"]
    starts: Int[Array, "groups E"]
    groups: Int[Array, ""]
    """Those that are not empty."""
    prompt_lengths: Int[Array, " N"]
    keys: PRNGKeyArray
    temperature: Float[Array, ""]
    eos_ids: Int[Array, " eos"]
    max_new_tokens: Int[Array, ""]


@flax.struct.dataclass
class Decoding:
    """The slots, and the responses so far. Slot s holds sequence `sequence[s]`, or none where it is not `active`."""

    cache: KVCache
    sequence: Int[Array, " S"]
    active: Bool[Array, " S"]
    last_token: Int[Array, " S"]
    length: Int[Array, " S"]
    """Tokens of the slot's response."""
    next_group: Int[Array, ""]
    tokens: Int[Array, "N R"]
    logprobs: Float[Array, "N R"]
    lengths: Int[Array, " N"]


def make_generate(model: Model, shape: Shape) -> Callable[[Any, Queue], tuple[Array, Array, Array]]:
    """generate(params, queue) -> the responses' tokens [N, R], log-probabilities [N, R] and lengths [N]."""

    def generate(params: Any, queue: Queue) -> tuple[Array, Array, Array]:
        decoding_params = model.decoding_params(params)

        def waiting(state: Decoding) -> Bool[Array, ""]:
            return state.next_group < queue.groups

        def fits(state: Decoding) -> Bool[Array, ""]:
            needed = jnp.sum(queue.sequences[state.next_group] >= 0)
            return waiting(state) & (needed <= jnp.sum(~state.active))

        def turn(state: Decoding) -> Decoding:
            state = jax.lax.while_loop(fits, lambda s: fill(model, shape, params, queue, s), state)
            return jax.lax.while_loop(
                lambda s: jnp.any(s.active) & ~fits(s),
                lambda s: decode(model, shape, decoding_params, queue, s),
                state,
            )

        start = empty(model, shape, queue.prompt_lengths.shape[0])
        end = jax.lax.while_loop(lambda s: jnp.any(s.active) | waiting(s), turn, start)
        # whole on every device, so that every process can read them
        return (
            model.constrain(end.tokens, (None, None)),
            model.constrain(end.logprobs, (None, None)),
            model.constrain(end.lengths, (None,)),
        )

    return jax.jit(generate)


def empty(model: Model, shape: Shape, sequences: int) -> Decoding:
    """All slots free, no response yet."""
    free = jnp.zeros(shape.slots, jnp.int32)
    return Decoding(
        cache=model.init_cache(shape.slots, shape.prompt_length + shape.new_tokens),
        sequence=free,
        active=free.astype(bool),
        last_token=free,
        length=free,
        next_group=jnp.int32(0),
        tokens=jnp.zeros((sequences, shape.new_tokens), jnp.int32),
        logprobs=jnp.zeros((sequences, shape.new_tokens), jnp.float32),
        lengths=jnp.zeros(sequences, jnp.int32),
    )


def fill(model: Model, shape: Shape, params: Any, queue: Queue, state: Decoding) -> Decoding:
    """The next group into free slots: its prompts enter the cache, and first tokens are drawn."""
    group = state.next_group
    hidden, keys, values = model.prefill(params, queue.tokens[group], queue.positions[group], queue.segment_ids[group])
    real, starts = queue.sequences[group] >= 0, queue.starts[group]
    sequence = jnp.where(real, queue.sequences[group], 0)
    free = jnp.nonzero(~state.active, size=len(real), fill_value=shape.slots)[0]
    slots = jnp.where(real, free, shape.slots)
    # what lies behind a prompt's end in its row enters with it, and is overwritten before it is read
    own = jnp.minimum(starts[:, None] + jnp.arange(shape.prompt_length), queue.tokens[0].size - 1)

    def enter(caches: tuple[Array, ...], new: Float[Array, "L B T G K"]) -> tuple[Array, ...]:
        rows = new.reshape(new.shape[0], -1, *new.shape[3:])
        return tuple(
            cache.at[slots, : shape.prompt_length].set(layer[own], mode="drop")
            for cache, layer in zip(caches, rows, strict=True)
        )

    state = dataclasses.replace(
        state,
        cache=KVCache(k=enter(state.cache.k, keys), v=enter(state.cache.v, values)),
        sequence=state.sequence.at[slots].set(sequence, mode="drop"),
        length=state.length.at[slots].set(0, mode="drop"),
        next_group=group + 1,
    )
    last = hidden.reshape(-1, hidden.shape[-1])[starts + queue.prompt_lengths[sequence] - 1]
    return draw(model, shape, params, queue, state, last, slots)


def decode(model: Model, shape: Shape, params: Any, queue: Queue, state: Decoding) -> Decoding:
    """One more token for every active slot."""
    positions = queue.prompt_lengths[state.sequence] + state.length - 1
    hidden, cache = model.decode(params, state.last_token, positions, state.active, state.cache)
    slots = jnp.where(state.active, jnp.arange(shape.slots), shape.slots)
    return draw(model, shape, params, queue, dataclasses.replace(state, cache=cache), hidden, slots)


def draw(
    model: Model, shape: Shape, params: Any, queue: Queue, state: Decoding, hidden: Array, slots: Array
) -> Decoding:
    """Draws and records a token from each row of hidden [G, D] for its slot; slots out of range are left alone."""
    sequence, length = state.sequence[slots], state.length[slots]
    tokens, logprobs = sample(
        model.unembed(params, hidden),
        jax.vmap(jax.random.fold_in)(queue.keys[sequence], length),
        queue.temperature,
        greedy=shape.greedy,
        top_k=shape.top_k,
        top_p=shape.top_p,
    )
    ended = jnp.any(tokens[:, None] == queue.eos_ids, axis=1) | (length + 1 >= queue.max_new_tokens)
    row = jnp.where(slots < shape.slots, sequence, queue.prompt_lengths.shape[0])
    return dataclasses.replace(
        state,
        active=state.active.at[slots].set(~ended, mode="drop"),
        last_token=state.last_token.at[slots].set(tokens, mode="drop"),
        length=state.length.at[slots].set(length + 1, mode="drop"),
        tokens=state.tokens.at[row, length].set(tokens, mode="drop"),
        logprobs=state.logprobs.at[row, length].set(logprobs, mode="drop"),
        lengths=state.lengths.at[row].set(length + 1, mode="drop"),
    )
