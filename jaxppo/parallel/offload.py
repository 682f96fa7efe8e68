"""Arrays in pinned host memory while their GPU's memory is needed for something else, and how much that is."""

from typing import Any

import jax


def to_host(tree: Any) -> Any:
    """The arrays in pinned host memory, laid out over devices as before; the given ones are dead afterwards."""
    return _move(tree, "pinned_host")


def to_device(tree: Any) -> Any:
    """The inverse of `to_host`."""
    return _move(tree, None)


def _move(tree: Any, kind: str | None) -> Any:
    def target(x: jax.Array) -> jax.sharding.Sharding:
        device = next(iter(x.sharding.device_set))
        return x.sharding.with_memory_kind(device.default_memory().kind if kind is None else kind)

    moved = jax.device_put(tree, jax.tree.map(target, tree), may_alias=False)
    jax.block_until_ready(moved)
    # deleted here and not by the garbage collector: the engine takes the memory next
    jax.tree.map(lambda x: x.delete(), tree)
    return moved
