"""Truncated importance weights by hand, against the oracle, and what must not change them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxppo.rl.correction import accepted, importance_weights
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


TESTS = {
    **{f"{level}_{k}": (0.5, 1.5) for level in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3")},
    **{f"{level}_{k}": (0.5, 0.1) for level in ("token", "seq_mean", "seq_max") for k in ("k2", "k3")},
    **{f"seq_sum_{k}": (0.5, 0.6) for k in ("k2", "k3")},
}


@jax.jit
def all_tests(train, rollout, mask, segment_ids):
    return {
        kind: accepted(train, rollout, mask, segment_ids, kind=kind, lower=lower, upper=upper)
        for kind, (lower, upper) in TESTS.items()
    }


def test_what_is_rejected_by_definition():
    kept, rejected = dict.fromkeys(TESTS, 0), dict.fromkeys(TESTS, 0)
    for seed in range(4):
        r = rows.make(seed, "train", "rollout")
        r.arrays["rollout"] = (r.arrays["train"] + 0.5 * r.arrays["rollout"]).astype(np.float32)
        found = all_tests(*map(jnp.asarray, (*r.arrays.values(), r.mask, r.segment_ids)))
        for kind, (lower, upper) in TESTS.items():
            expected = oracle.accepted(*r.arrays.values(), r.mask, r.segment_ids, kind, lower, upper)
            assert_array_equal(found[kind], expected, err_msg=kind)
            kept[kind] += expected.sum()
            rejected[kind] += (r.mask & ~expected).sum()
    assert min(kept.values()) > 0
    assert min(rejected.values()) > 0


def test_rejection_by_hand():
    """Ratios 1 and 3 in one sequence, 1/3 and then nothing in the next: a bound of 2 is of the ratio either way."""
    rollout = jnp.zeros((3, 12))
    ids = jnp.zeros((3, 12), int).at[0, :4].set(jnp.array([1, 1, 2, 2]))
    mask = jnp.zeros((3, 12), bool).at[0, :3].set(True)
    train = rollout.at[0, :3].set(jnp.log(jnp.array([1, 3, 1 / 3])))

    def stays(kind, lower, upper):
        return accepted(train, rollout, mask, ids, kind=kind, lower=lower, upper=upper)[0, :4].tolist()

    assert stays("token_k1", 0.5, 2.0) == [True, False, False, False]
    assert stays("seq_mean_k1", 0.5, 2.0) == [True, True, False, False]  # the geometric mean is the root of 3
    assert stays("seq_sum_k1", 0.5, 2.0) == [False, False, False, False]
    assert stays("seq_max_k3", 0.5, 0.5) == [False, False, True, False]  # 2 - log 3 and log 3 - 2 / 3
    assert stays("token_k2", 0.5, 0.6) == [True, False, False, False]


def test_mistakes_name_the_valid_values():
    x, mask, ids = jnp.zeros(2), jnp.ones(2, bool), jnp.array([1, 1])
    with pytest.raises(ValueError, match="valid are token, sequence"):
        weights(x, x, mask, ids, "turn")
    with pytest.raises(ValueError, match="cap = 0"):
        weights(x, x, mask, ids, "token", cap=0.0)
    for kind in ("seq_max_k1", "token_k4", "turn_k1"):
        with pytest.raises(ValueError, match="valid are token, seq_sum"):
            accepted(x, x, mask, ids, kind=kind, lower=0.5, upper=2.0)
