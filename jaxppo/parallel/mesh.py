"""The device mesh and the one table that lays every array out on it.

Axes, the fastest links last: `data` (rows split, parameters whole), `fsdp` (rows split; parameters, gradients and
optimizer state too), `context` (a row's tokens split; parameters as by fsdp, since its devices see other tokens) and
`tensor` (heads, mlp and vocabulary split).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxppo.config import ConfigError, MeshConfig
from jaxppo.models.collectives import Axes

AXES = ("data", "fsdp", "context", "tensor")
ROW_AXES = ("data", "fsdp")
WEIGHT_AXES = ("fsdp", "context")

Rules = dict[str | None, str | tuple[str, ...] | None]

RULES: Rules = {
    # parameters
    "layers": None,
    "vocab": "tensor",
    "embed": WEIGHT_AXES,
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    # activations
    "batch": ROW_AXES,
    "seq": None,
    "seq_inside": "context",
    "seq_between": ("context", "tensor"),
    None: None,
}
"""Mesh axes of each logical dimension. Tokens of a row are whole ("seq"), as inside a block, or as between blocks."""
ACTIVATION_RULES: Rules = RULES | {"embed": None}
MAY_STAY_WHOLE = ("kv_heads",)
"""Dimensions that every device has in full where their mesh axes do not divide them."""


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
    return num_shards(mesh, "batch")


def num_shards(mesh: Mesh, axis: str | None) -> int:
    """Into how many parts a logical dimension is split."""
    return math.prod(mesh.shape[name] for name in _names(RULES[axis]))


def partition_spec(mesh: Mesh, axes: Axes, shape: tuple[int, ...] | None = None, rules: Rules = RULES) -> PartitionSpec:
    """The mesh axes of each dimension. Raises ConfigError where they do not divide its size, if a shape is given."""
    sizes = (0,) * len(axes) if shape is None else shape
    return PartitionSpec(*(_divided(mesh, size, axis, rules) for size, axis in zip(sizes, axes, strict=True)))


def _divided(mesh: Mesh, size: int, axis: str | None, rules: Rules) -> str | tuple[str, ...] | None:
    names = _names(rules[axis])
    shards = math.prod(mesh.shape[name] for name in names)
    if size % shards == 0:
        return rules[axis]
    if axis in MAY_STAY_WHOLE:
        return None
    raise ConfigError(
        f"mesh.{' x mesh.'.join(names)} = {shards} does not divide the {size} of dimension {axis!r}: "
        f"valid sizes are {divisors(size, mesh.size)}"
    )


def _names(rule: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (rule,) if isinstance(rule, str) else rule or ()


def divisors(size: int, limit: int) -> str:
    """Example: divisors(6, 4) is "1, 2, 3"."""
    return ", ".join(str(d) for d in range(1, min(size, limit) + 1) if size % d == 0)


def parameter_shardings(mesh: Mesh, axes: Any, abstract: Any) -> Any:
    """The NamedSharding of each parameter: `axes` and `abstract` are trees of logical axes and of shapes."""
    return jax.tree.map(
        lambda a, s: NamedSharding(mesh, partition_spec(mesh, a, s.shape)),
        axes,
        abstract,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def constrain_fn(mesh: Mesh) -> Callable[[jax.Array, Axes], jax.Array]:
    """What a model calls on activations whose layout XLA's partitioner would otherwise choose."""

    def constrain(x: jax.Array, axes: Axes) -> jax.Array:
        spec = partition_spec(mesh, axes, x.shape, ACTIVATION_RULES)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

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
