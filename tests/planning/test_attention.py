"""The kernel's stand-in computes what the kernel does."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo.models.attention import packed_attention
from jaxppo.planning.attention import blockwise_attention


def test_values_and_gradients_are_those_of_packed_attention():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((2, 48, 4, 8), (2, 48, 2, 8), (2, 48, 2, 8), (2, 48, 4, 8))
    q, k, v, weight = (jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))
    ids = jnp.asarray([[1] * 20 + [2] * 18 + [0] * 10, [1] * 48])

    def values_and_gradients(attention):
        return jax.vjp(lambda q, k, v: attention(q, k, v, ids), q, k, v)[0], jax.grad(
            lambda *x: (attention(*x, ids) * weight).sum(), (0, 1, 2)
        )(q, k, v)

    got = values_and_gradients(blockwise_attention)
    want = values_and_gradients(lambda *x: packed_attention(*x, "xla"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)
