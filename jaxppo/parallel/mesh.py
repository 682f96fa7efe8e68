"""The device mesh and the one table that lays every array out on it.

Axes: `data` (replicated parameters), `fsdp` (parameters, gradients and optimizer state split; rows too) and
`tensor` (heads, mlp and vocabulary split). Rows of a microbatch are split over data x fsdp.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxppo.config import ConfigError, MeshConfig

LogicalAxes = tuple[str | None, ...]

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")

PARAMETER_RULES: dict[str | None, str | tuple[str, ...] | None] = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    None: None,
}
ACTIVATION_RULES: dict[str | None, str | tuple[str, ...] | None] = PARAMETER_RULES | {
    "batch": ROW_AXES,
    "seq": None,
    "embed": None,
}


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of all devices; the axis given as -1 takes what the others leave.

    Raises ConfigError where the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(config, axis) for axis in AXES}
    if bad := [f"mesh.{a} = {s}" for a, s in sizes.items() if s < 1 and s != -1]:
        raise ConfigError(f"{', '.join(bad)}: an axis is a positive number of devices, or -1 for what is left")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ConfigError(f"mesh.{' and mesh.'.join(free)} are both -1: at most one axis can take what is left")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free:
        sizes[free[0]] = len(devices) // fixed
    if math.prod(sizes.values()) != len(devices):
        given = ", ".join(f"mesh.{axis} = {getattr(config, axis)}" for axis in AXES)
        raise ConfigError(f"{given}: the axes must multiply to the number of devices, {len(devices)}")
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def num_row_shards(mesh: Mesh) -> int:
    """Over how many devices the rows of a microbatch are split."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def _spec(rules: dict, axes: LogicalAxes, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The mesh axes of each dimension. Raises ConfigError where they do not divide it."""
    for size, axis in zip(shape, axes, strict=True):
        names = (rules[axis],) if isinstance(rules[axis], str) else (rules[axis] or ())
        shards = math.prod(mesh.shape[name] for name in names)
        if size % shards:
            divisors = [d for d in range(1, size + 1) if size % d == 0 and d <= mesh.size]
            raise ConfigError(
                f"mesh.{' x mesh.'.join(names)} = {shards} does not divide the {size} of dimension {axis!r}: "
                f"valid sizes are {', '.join(map(str, divisors))}"
            )
    return PartitionSpec(*(rules[axis] for axis in axes))


def parameter_shardings(mesh: Mesh, axes: Any, abstract: Any) -> Any:
    """The NamedSharding of each parameter: `axes` and `abstract` are trees of logical axes and of shapes."""
    return jax.tree.map(
        lambda a, s: NamedSharding(mesh, _spec(PARAMETER_RULES, a, s.shape, mesh)),
        axes,
        abstract,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def constrain_fn(mesh: Mesh) -> Callable[[jax.Array, LogicalAxes], jax.Array]:
    """What a model calls on its activations to pin their layout."""

    def constrain(x: jax.Array, axes: LogicalAxes) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, _spec(ACTIVATION_RULES, axes, x.shape, mesh)))

    return constrain


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def row_sharding(mesh: Mesh, leading: int) -> NamedSharding:
    """Of arrays [..., rows, tokens] with `leading` dimensions before the rows."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading, ROW_AXES))


def place_rows(batch: Any, mesh: Mesh) -> Any:
    """A host's packed batch on the mesh: arrays [M, K, B, T] with their rows split, what is smaller left alone."""
    rows = row_sharding(mesh, 2)
    return jax.tree.map(lambda x: to_global(x, rows) if x.ndim == 4 else x, batch)


def to_global(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array from a host array that every process holds in full; each device takes its part."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
