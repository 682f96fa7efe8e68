"""What the layers do between devices. Here: one device, so nothing; `parallel.collectives` has the mesh's.

A layer is written as one device computes it, on its rows, tokens, heads and parts of the weights, with a call wherever
another device's part is needed. Between blocks a device holds its tokens of the residual stream in full; inside a
block it holds more tokens, and its heads, its part of the mlp or of the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Int

Axes = tuple[str | None, ...]
"""Logical names of an array's dimensions."""
Kernel = Callable[[Array, Array, Array, Array], Array]
"""(q [B, T, H, K], k and v [B, T, G, K], segment_ids [B, T]) -> [B, T, H, K], on whole rows."""


class Collectives:
    """All of them the identity, or what one device does alone."""

    def spread(self, function: Callable, inputs: Any, output: Any) -> Callable:
        """The function of whole arrays whose parts `function` computes on each device.

        `inputs` and `output` are trees of logical axes.
        """
        return function

    def gather(self, weight: Float[Array, "..."], axes: Axes) -> Float[Array, "..."]:
        """A weight whose embed dimension is split, in full; its gradient is summed in float32 and split again."""
        return weight

    def scatter(self, gradient: Float[Array, "..."], axes: Axes) -> Float[Array, "..."]:
        """The sum over devices of a gathered weight's gradient, split as the weight is."""
        return gradient

    def enter(self, x: Float[Array, "B t D"]) -> Float[Array, "B u D"]:
        """The residual stream's tokens that a block works on."""
        return x

    def leave(self, x: Float[Array, "B u D"]) -> Float[Array, "B t D"]:
        """The inverse of enter, of the sum over devices that hold other heads, or other parts of the mlp."""
        return x

    def lookup(self, table: Float[Array, "V D"], tokens: Int[Array, "B u"], dtype: Any) -> Float[Array, "B t D"]:
        """The tokens' rows of the embedding table."""
        return table[tokens].astype(dtype)

    def attend(
        self,
        kernel: Kernel,
        q: Float[Array, "B u h K"],
        k: Float[Array, "B u g K"],
        v: Float[Array, "B u g K"],
        segment_ids: Int[Array, "B T"],
        kv_heads: int,
    ) -> Float[Array, "B u h K"]:
        """The kernel on whole rows, for the device's tokens; `kv_heads` are the model's."""
        return kernel(q, k, v, segment_ids)

    def own_kv_heads(self, x: Float[Array, "B T g K"], kv_heads: int) -> Float[Array, "B T own K"]:
        """The KV heads that a device's queries read, where it holds all of the model's `kv_heads` or its part."""
        return x

    def vocab_start(self, size: int) -> int | Int[Array, ""]:
        """The first token id of a device's part of the vocabulary, which has `size` ids."""
        return 0

    def vocab_sum(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The sum over the parts of the vocabulary."""
        return x

    def vocab_logsumexp(self, logits: Float[Array, "... V"]) -> Float[Array, "..."]:
        """log Σ exp over the whole vocabulary."""
        return jax.nn.logsumexp(logits, axis=-1)

    def most(self, count: Int[Array, ""]) -> Int[Array, ""]:
        """The maximum over all devices."""
        return count


ONE_DEVICE = Collectives()


def unconstrained(x: jax.Array, axes: Axes) -> jax.Array:
    """Leaves an activation's layout alone."""
    return x
