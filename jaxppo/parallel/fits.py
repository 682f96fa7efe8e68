"""Whether networks and rows split evenly over a mesh: looked at before anything is compiled."""

import math

from jax.sharding import Mesh

from jaxppo.config import ConfigError
from jaxppo.models import Architecture
from jaxppo.parallel.mesh import divisors


def check_fits(mesh: Mesh, network: Architecture, setting: str, row_length: int) -> None:
    """Raises ConfigError where the mesh does not divide what it splits; `setting` is where the network comes from.

    Rows need no check (microbatches have as many as divide), nor KV heads: where there are too few, they are repeated.
    """
    checks = [
        (("fsdp", "context"), network.hidden_size, f"the hidden size of {setting}"),
        (("context", "tensor"), network.num_heads, f"the number of attention heads of {setting}"),
        (("tensor",), network.intermediate_size, f"the mlp width of {setting}"),
        (("tensor",), network.vocab_size, f"the vocabulary of {setting}"),
    ]
    for axes, size, what in checks:
        shards = math.prod(mesh.shape[axis] for axis in axes)
        if size % shards:
            raise ConfigError(f"{given(mesh, axes)} must divide {size}, {what}: valid is {divisors(size, mesh.size)}")
    axes = ("context", "tensor")
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if row_length % shards:
        raise ConfigError(
            f"actor.row_length = {row_length}: {given(mesh, axes)} must divide it, such as "
            f"{-(-row_length // shards) * shards}"
        )


def given(mesh: Mesh, axes: tuple[str, ...]) -> str:
    """Of the axes, those that split anything. Example: "mesh.fsdp x mesh.context = 4 x 2"."""
    split = [axis for axis in axes if mesh.shape[axis] > 1]
    return f"{' x '.join(f'mesh.{a}' for a in split)} = {' x '.join(str(mesh.shape[a]) for a in split)}"
