"""Goldens, the oracle, and whitening over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from jaxppo.rl.masked import masked_mean, masked_sum, masked_variance, segment_sum, whiten
from tests import oracle
from tests.rl import rows

whiten_jit = jax.jit(whiten)
segment_sum_jit = jax.jit(segment_sum)


def test_sums_and_means_see_only_the_mask():
    x, mask = jnp.array([1.0, jnp.nan, 4.0]), jnp.array([True, False, True])
    assert masked_sum(x, mask) == 5
    assert masked_mean(x, mask) == 2.5
    assert_array_equal(jax.grad(masked_sum)(x, mask), [1, 0, 1])
    assert_array_equal(jax.grad(masked_mean)(x, mask), [0.5, 0, 0.5])


def test_empty_masks_give_zero():
    x, mask = jnp.array([jnp.nan, 2.0]), jnp.array([False, False])
    assert masked_sum(x, mask) == masked_mean(x, mask) == masked_variance(x, mask) == 0
    assert_array_equal(jax.grad(masked_mean)(x, mask), [0, 0])


def test_sums_of_bfloat16_are_float32():
    ones = jnp.ones(1000, jnp.bfloat16)
    assert masked_sum(ones, ones == 1) == 1000
    assert masked_sum(ones, ones == 1).dtype == jnp.float32


def test_whiten_goldens():
    assert_allclose(whiten(jnp.array([1.0, 2, 3]), jnp.ones(3, bool)), [-1, 0, 1], atol=1e-6)
    assert_array_equal(whiten(jnp.array([3.0, 3, 3]), jnp.ones(3, bool)), [0, 0, 0])


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-6])
def test_equal_values_give_zeros_whatever_the_mean_rounds_to(scale):
    assert_array_equal(whiten_jit(jnp.full(13, 0.1 * scale), jnp.ones(13, bool)), 0)


@pytest.mark.parametrize(("valid", "expected"), [(0, [0, 0, 0]), (1, [5, 0, 0]), (2, [-(0.5**0.5), 0.5**0.5, 0])])
def test_whitening_few_tokens(valid, expected):
    x = jnp.array([5.0, 7.0, jnp.nan])
    assert_allclose(whiten_jit(x, jnp.arange(3) < valid), expected, atol=1e-6)


def test_whiten_matches_the_oracle():
    packed = rows.make(0, "x")
    result = whiten_jit(jnp.asarray(packed.arrays["x"]), jnp.asarray(packed.mask))
    assert_allclose(result, oracle.whiten(packed.arrays["x"], packed.mask), atol=1e-6)
    assert_array_equal(result[~packed.mask], 0)


def test_whitening_does_not_depend_on_devices():
    x = np.random.default_rng(1).normal(3, 2, size=(8, 4)).astype(np.float32)
    mask = np.random.default_rng(2).random((8, 4)) < 0.7
    mask[5] = False  # one device holds no token at all
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows_apart = NamedSharding(mesh, PartitionSpec("data"))
    apart = whiten_jit(jax.device_put(x, rows_apart), jax.device_put(mask, rows_apart))
    assert len(apart.sharding.device_set) == 8
    assert_allclose(apart, whiten_jit(jnp.asarray(x), jnp.asarray(mask)), atol=1e-6)
    assert_allclose(apart, oracle.whiten(x, mask), atol=1e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.floats(-100, 100, width=32), min_size=6, max_size=6), st.integers(0, 63))
def test_whitened_tokens_have_mean_0_and_variance_1(values, bits):
    x, mask = np.array(values, np.float32), np.array([bits >> i & 1 for i in range(6)], bool)
    result = np.asarray(whiten_jit(jnp.asarray(x), jnp.asarray(mask)), np.float64)
    assert np.isfinite(result).all()
    assert_array_equal(result[~mask], 0)
    if mask.sum() >= 2:
        assert abs(result[mask].mean()) < 1e-3
        if np.ptp(x[mask]) > 0.1:
            assert_allclose(result[mask].var(ddof=1), 1, atol=1e-3)


def test_segment_sum_golden():
    x, mask = jnp.array([1.0, 2, 3, 4]), jnp.array([False, True, True, True])
    assert_array_equal(segment_sum_jit(x, mask, jnp.array([1, 1, 1, 0])), [5, 5, 5, 0])
    assert_array_equal(segment_sum_jit(x, mask, jnp.array([1, 1, 2, 2])), [2, 2, 7, 7])
    # Any ids do, as long as neighbours differ.
    assert_array_equal(segment_sum_jit(x, mask, jnp.array([0, 900, 7, 7])), [0, 2, 7, 7])


def test_segment_sum_for_any_leading_shape():
    packed = rows.make(3, "x")
    expected = np.zeros(packed.mask.shape)
    for b, t in np.ndindex(*packed.mask.shape):
        own = packed.mask[b] & (packed.segment_ids[b] == packed.segment_ids[b, t])
        expected[b, t] = packed.arrays["x"][b][own].sum() if packed.segment_ids[b, t] else 0
    x, mask, ids = (jnp.asarray(a) for a in (packed.arrays["x"], packed.mask, packed.segment_ids))
    assert_allclose(segment_sum_jit(x, mask, ids), expected, atol=1e-6)
    assert_allclose(segment_sum_jit(x[:, None], mask[:, None], ids[:, None])[:, 0], expected, atol=1e-6)
    assert_allclose(segment_sum_jit(x[0], mask[0], ids[0]), expected[0], atol=1e-6)
