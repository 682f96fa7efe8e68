"""Truncated importance weights by hand, against the oracle, and what must not change them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxppo.rl.correction import importance_weights
from tests import oracle
from tests.rl import rows

LEVELS = ["token", "sequence"]


def weights(train, rollout, mask, segment_ids, level, cap=2.0):
    arrays = map(jnp.asarray, (train, rollout, mask, segment_ids))
    return importance_weights(*arrays, level=level, cap=cap)


def test_goldens():
    rollout = jnp.array([-1.0, -2.0, -3.0, 0.0])
    train = rollout + jnp.log(jnp.array([1.5, 3.0, 0.25, 1.0]))
    mask = jnp.array([True, True, True, False])
    assert_allclose(weights(train, rollout, mask, jnp.array([1, 1, 2, 0]), "token"), [1.5, 2, 0.25, 0], rtol=1e-6)
    by_sequence = weights(train, rollout, mask, jnp.array([1, 1, 2, 0]), "sequence")
    assert_allclose(by_sequence, [2, 2, 0.25, 0], rtol=1e-6)
    uncapped = weights(train, rollout, mask, jnp.array([1, 1, 1, 0]), "sequence", cap=100.0)
    assert_allclose(uncapped, [1.125, 1.125, 1.125, 0], rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_the_oracle_agrees_and_garbage_outside_the_mask_does_not_matter(level):
    with jax.enable_x64(True):
        r = rows.make(0, "train", "rollout", dtype=np.float64)
        args = (*map(jnp.asarray, r.arrays.values()), jnp.asarray(r.mask), jnp.asarray(r.segment_ids))
        expected = oracle.importance_weights(*r.arrays.values(), r.mask, r.segment_ids, level, 1.5)
        assert_allclose(weights(*args, level, 1.5), expected, rtol=1e-12)
        assert_array_equal(jax.grad(lambda x: weights(x, *args[1:], level).sum())(args[0]), 0)


@pytest.mark.parametrize("level", LEVELS)
def test_packing_does_not_matter(level):
    packed = rows.make(1, "train", "rollout")
    alone, places = rows.unpack(packed, 14)
    result = weights(*alone.arrays.values(), alone.mask, alone.segment_ids, level)
    expected = weights(*packed.arrays.values(), packed.mask, packed.segment_ids, level)
    assert_allclose(rows.repack(np.asarray(result), places, packed.mask), expected, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_equal_policies_weigh_exactly_one_and_distant_ones_stay_finite(level):
    mask, ids = jnp.ones(3, bool), jnp.array([1, 1, 1])
    logp = jnp.array([-0.1, -3.3, -7.7])
    assert_array_equal(weights(logp, logp, mask, ids, level), 1)
    assert_array_equal(weights(logp + 1e4, logp, mask, ids, level), 2)
    assert jnp.isfinite(weights(logp - 1e4, logp, mask, ids, level)).all()


def test_mistakes_name_the_valid_values():
    x, mask, ids = jnp.zeros(2), jnp.ones(2, bool), jnp.array([1, 1])
    with pytest.raises(ValueError, match="valid are token, sequence"):
        weights(x, x, mask, ids, "turn")
    with pytest.raises(ValueError, match="cap = 0"):
        weights(x, x, mask, ids, "token", cap=0.0)
