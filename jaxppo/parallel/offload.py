"""Arrays in pinned host memory while their GPU's memory is needed for something else."""

from typing import Any

import jax


def to_host(tree: Any) -> Any:
    """The arrays in pinned host memory, laid out over devices as before; the given ones are dead afterwards."""
    moved = _copy(tree, "pinned_host")
    # deleted here and not by the garbage collector: the engine takes the memory next
    jax.tree.map(lambda x: x.delete(), tree)
    return moved


def to_device(tree: Any) -> Any:
    """Copies in device memory; the given arrays stay. Arrays that are there already are returned as they are."""
    return _copy(tree, None)


def _copy(tree: Any, kind: str | None) -> Any:
    def target(x: jax.Array) -> jax.sharding.Sharding:
        device = next(iter(x.sharding.device_set))
        return x.sharding.with_memory_kind(device.default_memory().kind if kind is None else kind)

    return jax.block_until_ready(jax.device_put(tree, jax.tree.map(target, tree)))
