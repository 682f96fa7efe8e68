"""What an engine is sent is what the trainer has: every name once, every sum equal, in the engine's dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.config import MeshConfig
from jaxppo.models.config import Architecture
from jaxppo.models.parameters import abstract_params, declare, init_params, parameter_axes
from jaxppo.parallel.mesh import make_mesh, parameter_shardings
from jaxppo.rollout.buckets import make_buckets

ARCHITECTURE = Architecture.from_dict(
    {
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "tie_word_embeddings": True,
    }
)


def split_parameters(mesh):
    shardings = parameter_shardings(mesh, parameter_axes(ARCHITECTURE), abstract_params(ARCHITECTURE, jnp.float32))
    return jax.device_put(init_params(ARCHITECTURE, jax.random.key(0)), shardings)


@pytest.mark.parametrize(("limit", "buckets"), [(2**30, 2), (2 * 4 * 9344, 3), (1, 4)])
def test_all_parameters_go_over_once_whatever_the_buckets(limit, buckets):
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    params = split_parameters(mesh)
    sent = list(make_buckets(ARCHITECTURE, "float32", mesh, limit)(params))
    assert len(sent) == buckets
    names = [name for bucket in sent for stack in bucket for name in stack]
    assert len(names) == len(set(names)) == 2 + 3 * 12
    assert "lm_head.weight" not in names  # tied: the embedding goes once
    arrays = {name: x for bucket in sent for stack, xs in bucket.items() for name, x in zip(stack, xs, strict=True)}
    for path, p in declare(ARCHITECTURE).items():
        value = params
        for key in path:
            value = value[key]
        for i, layer in enumerate(np.asarray(value) if p.stacked else [np.asarray(value)]):
            np.testing.assert_array_equal(arrays[p.name.format(layer=i)], layer.reshape(p.flat))


def test_the_cast_is_the_engines():
    mesh = make_mesh(MeshConfig())
    params = split_parameters(mesh)
    for bucket in make_buckets(ARCHITECTURE, "bfloat16", mesh)(params):
        for stack in bucket.values():
            assert stack.dtype == jnp.bfloat16
            assert len(stack.devices()) == 1
