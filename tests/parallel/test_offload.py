"""To pinned host memory and back, bit by bit, with the layout kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxppo.config import MeshConfig
from jaxppo.parallel.mesh import make_mesh
from jaxppo.parallel.offload import to_device, to_host


def test_a_round_trip_keeps_values_and_layout_and_frees_the_source():
    mesh = make_mesh(MeshConfig())
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    tree = {
        "m": jax.device_put(jnp.arange(16.0), sharding),
        "count": jax.device_put(3, NamedSharding(mesh, PartitionSpec())),
    }
    before = jax.tree.map(np.asarray, tree)
    on_host = to_host(tree)
    assert tree["m"].is_deleted()
    assert on_host["m"].sharding.memory_kind == "pinned_host"
    assert on_host["m"].sharding.spec == sharding.spec
    back = to_device(on_host)
    assert not on_host["m"].is_deleted()
    assert back["m"].sharding == sharding
    jax.tree.map(np.testing.assert_array_equal, back, before)


def test_deleted_arrays_are_not_silently_moved():
    tree = {"m": jnp.arange(4.0)}
    tree["m"].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        to_host(tree)
