"""Attention over a cache: the kernel, interpreted, against the masked formula; lengths alone decide what is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.models.decode_attention import BLOCK, decode_attention

LENGTHS = jnp.array([0, 1, BLOCK, BLOCK + 1, 2 * BLOCK])


def arrays(heads: int, groups: int, size: int = 8):
    shapes = (5, heads, size), (5, 2 * BLOCK, groups, size), (5, 2 * BLOCK, groups, size)
    return [jax.random.normal(key, s) for key, s in zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)]


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (6, 2), (9, 3), (34, 2)])
def test_the_kernel_equals_the_formula(heads, groups):
    q, k, v = arrays(heads, groups)
    want = decode_attention(q, k, v, LENGTHS, "xla")
    got = decode_attention(q, k, v, LENGTHS, "cudnn_packed", interpret=True)
    np.testing.assert_allclose(got[1:], want[1:], atol=1e-6)
    assert not got[0].any()


def test_by_hand():
    """One key head of size 1, two tokens: weights e^0 and e^ln 3 over scores 0 and ln 3."""
    q, k, v = (jnp.zeros((1, 1, 1)) + 1, jnp.zeros((1, BLOCK, 1, 1)), jnp.zeros((1, BLOCK, 1, 1)))
    k, v = k.at[0, 1].set(np.log(3)), v.at[0, :2, 0, 0].set(jnp.array([4.0, 8.0]))
    for implementation in ("xla", "cudnn_packed"):
        out = decode_attention(q, k, v, jnp.array([2]), implementation, interpret=True)
        np.testing.assert_allclose(out, [[[7.0]]], rtol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "cudnn_packed"])
def test_what_lies_beyond_a_length_is_not_read(implementation):
    q, k, v = arrays(4, 2)
    beyond = (np.arange(2 * BLOCK) >= LENGTHS[:, None])[..., None, None]
    dirty = [jnp.where(beyond, 1e9, x) for x in (k, v)]
    want, got = (decode_attention(q, *kv, LENGTHS, implementation, interpret=True) for kv in ((k, v), dirty))
    np.testing.assert_array_equal(got[1:], want[1:])
