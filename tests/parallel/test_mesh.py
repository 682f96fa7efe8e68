import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxppo.config import ConfigError, MeshConfig
from jaxppo.parallel.mesh import constrain_fn, make_mesh, num_row_shards, parameter_shardings, row_sharding, to_global


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MeshConfig(), (1, 8, 1, 1)),
        (MeshConfig(data=8, fsdp=1), (8, 1, 1, 1)),
        (MeshConfig(fsdp=2, context=-1), (1, 2, 4, 1)),
        (MeshConfig(data=2, fsdp=-1, tensor=2), (2, 2, 1, 2)),
    ],
)
def test_one_axis_takes_what_is_left(config, shape):
    mesh = make_mesh(config)
    assert tuple(mesh.shape.values()) == shape
    assert num_row_shards(mesh) == shape[0] * shape[1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(data=3), r"mesh\.data = 3, .* multiply to the number of devices, 8"),
        (MeshConfig(data=-1), "mesh.data and mesh.fsdp are both -1"),
        (MeshConfig(tensor=0), "mesh.tensor = 0: an axis is a positive number"),
    ],
)
def test_axes_that_do_not_fit_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(config)


def test_parameters_lie_as_the_table_says():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    shapes = {"up": jax.ShapeDtypeStruct((3, 4, 8), jnp.float32), "norm": jax.ShapeDtypeStruct((3, 4), jnp.float32)}
    found = parameter_shardings(mesh, {"up": ("layers", "embed", "mlp"), "norm": ("layers", None)}, shapes)
    assert found["up"].spec == PartitionSpec(None, ("fsdp", "context"), "tensor")
    assert found["norm"].spec == PartitionSpec(None, None)


def test_kv_heads_that_do_not_divide_stay_whole():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    found = parameter_shardings(mesh, {"k": ("kv_heads", "embed")}, {"k": jax.ShapeDtypeStruct((2, 8), jnp.float32)})
    assert found["k"].spec == PartitionSpec(None, ("fsdp", "context"))


def test_a_dimension_that_does_not_divide_is_refused_with_the_valid_sizes():
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, tensor=4))
    with pytest.raises(ConfigError, match=r"mesh.tensor = 4 does not divide the 6 .*'mlp': valid sizes are 1, 2, 3, 6"):
        parameter_shardings(mesh, {"up": ("mlp",)}, {"up": jax.ShapeDtypeStruct((6,), jnp.float32)})


def test_rows_are_split_over_data_and_fsdp():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    array = to_global(np.arange(24).reshape(1, 1, 8, 3), row_sharding(mesh, 2))
    assert {shard.data.shape for shard in array.addressable_shards} == {(1, 1, 2, 3)}
    pinned = jax.jit(lambda x: constrain_fn(mesh)(x, ("batch", "seq", "embed")))(jnp.zeros((4, 2, 6)))
    assert {shard.data.shape for shard in pinned.addressable_shards} == {(1, 2, 6)}
