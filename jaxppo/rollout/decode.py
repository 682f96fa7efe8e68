"""The built-in engine's device program: one loop that fills free slots from a queue and decodes all slots.

S slots decode at the same time; the call's sequences (prompt i, sample j) wait in one queue. A sequence's draws
depend on nothing but its own key and its own position, so neither its slot nor its company changes its tokens.
A step reads no more of the cache than its longest sequence needs, rounded up to one of a few static windows.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxppo.models import KVCache, Model
from jaxppo.rollout.sampling import sample

MAX_WINDOWS = 8
"""Each is one more copy of the decode step to compile."""
WINDOW_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a program is compiled for."""

    slots: int
    group: int
    """Prompts that are prefilled at a time."""
    prompt_length: int
    new_tokens: int
    greedy: bool
    top_k: int
    top_p: float


@flax.struct.dataclass
class Queue:
    """The sequences of one call, padded to a fixed number; what is constant while they decode."""

    prompts: Int[Array, "N P"]
    prompt_lengths: Int[Array, " N"]
    keys: PRNGKeyArray
    size: Int[Array, ""]
    """Sequences that are real."""
    temperature: Float[Array, ""]
    eos_ids: Int[Array, " E"]
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
    next_sequence: Int[Array, ""]
    tokens: Int[Array, "N R"]
    logprobs: Float[Array, "N R"]
    lengths: Int[Array, " N"]


def make_generate(model: Model, shape: Shape) -> Callable[[Any, Queue], Decoding]:
    """generate(params, queue) -> the final Decoding, whose tokens, logprobs and lengths are the responses."""

    def generate(params: Any, queue: Queue) -> Decoding:
        def turn(state: Decoding) -> Decoding:
            state = jax.lax.while_loop(
                lambda s: jnp.any(~s.active) & waiting(s), lambda s: fill(model, shape, params, queue, s), state
            )
            bounds = windows(shape.prompt_length + shape.new_tokens)
            for shorter, window in itertools.pairwise((0, *bounds)):
                state = decode_within(shorter, window, state)
            return state

        def decode_within(shorter: int, window: int, state: Decoding) -> Decoding:
            def fits(state: Decoding) -> Bool[Array, ""]:
                longest = jnp.max(jnp.where(state.active, next_positions(queue, state), 0))
                return goes_on(state) & (shorter <= longest) & (longest < window)

            return jax.lax.while_loop(fits, lambda s: decode(model, shape, params, queue, s, window), state)

        def waiting(state: Decoding) -> Bool[Array, ""]:
            return state.next_sequence < queue.size

        def goes_on(state: Decoding) -> Bool[Array, ""]:
            free = jnp.sum(~state.active)
            return jnp.any(state.active) & (~waiting(state) | (free < shape.group))

        start = empty(model, shape, queue.prompts.shape[0])
        return jax.lax.while_loop(lambda s: jnp.any(s.active) | waiting(s), turn, start)

    return jax.jit(generate)


def windows(capacity: int) -> tuple[int, ...]:
    """Ascending numbers of cache indices that a step may read; the last is all of them. At most MAX_WINDOWS."""
    step = WINDOW_MULTIPLE * -(-capacity // (WINDOW_MULTIPLE * MAX_WINDOWS))
    return (*range(step, capacity, step), capacity)


def next_positions(queue: Queue, state: Decoding) -> Int[Array, " S"]:
    """Where each slot's last token goes in the cache."""
    return queue.prompt_lengths[state.sequence] + state.length - 1


def empty(model: Model, shape: Shape, sequences: int) -> Decoding:
    """All slots free, no response yet."""
    free = jnp.zeros(shape.slots, jnp.int32)
    cache = model.init_cache(shape.slots, shape.prompt_length + shape.new_tokens)
    layout = ("layers", "batch", "seq", "kv_heads", None)
    return Decoding(
        cache=jax.tree.map(lambda x: model.constrain(x, layout), cache),
        sequence=free,
        active=free.astype(bool),
        last_token=free,
        length=free,
        next_sequence=jnp.int32(0),
        tokens=jnp.zeros((sequences, shape.new_tokens), jnp.int32),
        logprobs=jnp.zeros((sequences, shape.new_tokens), jnp.float32),
        lengths=jnp.zeros(sequences, jnp.int32),
    )


def fill(model: Model, shape: Shape, params: Any, queue: Queue, state: Decoding) -> Decoding:
    """The next waiting sequences, up to a group, into free slots: prompts enter the cache, first tokens are drawn."""
    nobody = shape.slots
    slots = jnp.nonzero(~state.active, size=shape.group, fill_value=nobody)[0]
    sequence = state.next_sequence + jnp.arange(shape.group)
    taken = (slots < nobody) & (sequence < queue.size)
    slots, sequence = jnp.where(taken, slots, nobody), jnp.where(taken, sequence, 0)
    positions = jnp.broadcast_to(jnp.arange(shape.prompt_length), (shape.group, shape.prompt_length))
    prompts = model.init_cache(shape.group, shape.prompt_length)
    hidden, prompts = model.forward_cached(params, queue.prompts[sequence], positions, prompts)
    last = jnp.take_along_axis(hidden, queue.prompt_lengths[sequence][:, None, None] - 1, axis=1)[:, 0]
    state = dataclasses.replace(
        state,
        cache=jax.tree.map(
            lambda all_slots, new: all_slots.at[:, slots, : shape.prompt_length].set(new, mode="drop"),
            state.cache,
            prompts,
        ),
        sequence=state.sequence.at[slots].set(sequence, mode="drop"),
        length=state.length.at[slots].set(0, mode="drop"),
        next_sequence=state.next_sequence + jnp.sum(taken),
    )
    return draw(model, shape, params, queue, state, last, slots)


def decode(model: Model, shape: Shape, params: Any, queue: Queue, state: Decoding, window: int) -> Decoding:
    """One more token for every active slot, all of which are shorter than `window`."""
    # a free slot writes to the last index, which no sequence reads before writing it itself
    last = shape.prompt_length + shape.new_tokens - 1
    position = jnp.where(state.active, next_positions(queue, state), last)
    hidden, cache = model.forward_cached(params, state.last_token[:, None], position[:, None], state.cache, window)
    slots = jnp.where(state.active, jnp.arange(shape.slots), shape.slots)
    return draw(model, shape, params, queue, dataclasses.replace(state, cache=cache), hidden[:, 0], slots)


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
    row = jnp.where(slots < shape.slots, sequence, queue.prompts.shape[0])
    return dataclasses.replace(
        state,
        active=state.active.at[slots].set(~ended, mode="drop"),
        last_token=state.last_token.at[slots].set(tokens, mode="drop"),
        length=state.length.at[slots].set(length + 1, mode="drop"),
        tokens=state.tokens.at[row, length].set(tokens, mode="drop"),
        logprobs=state.logprobs.at[row, length].set(logprobs, mode="drop"),
        lengths=state.lengths.at[row].set(length + 1, mode="drop"),
    )
