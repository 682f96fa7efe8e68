"""The actor's parameters as an engine wants them: Hugging Face names, its dtype, whole on its device, bit by bit.

One program per bucket casts, and gathers what the mesh has split; so never more than one bucket exists in full.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxppo.models.config import Architecture
from jaxppo.models.parameters import Parameter, at, declare
from jaxppo.parallel.mesh import replicated

Bucket = dict[tuple[str, ...], jax.Array]
"""Names -> [names, *shape] on one local device: one row for each name. A stack is one pointer to hand over, not 30."""

BUCKET_BYTES = 2**30


def make_buckets(
    architecture: Architecture, dtype: Any, mesh: Mesh, limit: int = BUCKET_BYTES
) -> Callable[[Any], Iterator[Bucket]]:
    """buckets(params): all parameters, each once, some layers at a time (one at least) within `limit` bytes."""
    dtype = jnp.dtype(dtype)
    table = declare(architecture)
    stacked = {path: p for path, p in table.items() if p.stacked}
    single = {path: p for path, p in table.items() if not p.stacked}
    layers = architecture.num_layers
    layer_bytes = sum(_size(p) for p in stacked.values()) * dtype.itemsize
    step = min(layers, max(1, limit // layer_bytes))

    @partial(jax.jit, out_shardings=replicated(mesh))
    def take_single(params: Any) -> list[jax.Array]:
        return [at(params, path).reshape(1, *p.flat).astype(dtype) for path, p in single.items()]

    @partial(jax.jit, static_argnames="count", out_shardings=replicated(mesh))
    def take_layers(params: Any, start: jax.Array, count: int) -> list[jax.Array]:
        def take(path: tuple[str, ...], p: Parameter) -> jax.Array:
            window = jax.lax.dynamic_slice_in_dim(at(params, path), start, count)
            return window.reshape(count, *p.flat).astype(dtype)

        return [take(path, p) for path, p in stacked.items()]

    def buckets(params: Any) -> Iterator[Bucket]:
        yield _named([(p.name,) for p in single.values()], take_single(params))
        for start in range(0, layers, step):
            count = min(step, layers - start)
            names = [tuple(p.name.format(layer=start + i) for i in range(count)) for p in stacked.values()]
            yield _named(names, take_layers(params, jnp.int32(start), count))

    return buckets


def _named(names: list[tuple[str, ...]], arrays: list[jax.Array]) -> Bucket:
    return {key: array.addressable_data(0) for key, array in zip(names, arrays, strict=True)}


def _size(p: Parameter) -> int:
    """Elements of one layer."""
    return math.prod(p.flat)
