"""Token rewards and GAE: goldens, the oracle, and what must not change them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxppo.rl.advantages import (
    gae,
    optimal_token_baseline,
    reinforce_plus_plus,
    remax,
    token_rewards,
)
from jaxppo.rl.kl import kl_estimate
from tests import oracle
from tests.rl import rows

gae_jit = jax.jit(gae)
token_rewards_jit = jax.jit(token_rewards)


def run_gae(packed, gamma=0.97, lam=0.9):
    arrays = (packed.arrays["rewards"], packed.arrays["values"], packed.mask, packed.segment_ids)
    return gae_jit(*map(jnp.asarray, arrays), gamma=gamma, lam=lam)


def golden_row(rewards, values, mask, segment_ids=None):
    ids = np.ones(len(mask), np.int32) if segment_ids is None else np.array(segment_ids, np.int32)
    row = (jnp.array([rewards], jnp.float32), jnp.array([values], jnp.float32))
    advantages, returns = gae_jit(*row, jnp.array([mask], bool), jnp.array([ids]), gamma=1.0, lam=0.95)
    keep = np.array(mask, bool)
    assert_array_equal(advantages[0][~keep], 0)
    assert_array_equal(returns[0][~keep], 0)
    return np.asarray(advantages)[0][keep], np.asarray(returns)[0][keep]


@pytest.mark.parametrize(
    ("rewards", "values", "mask", "segment_ids"),
    [
        ([0, 0, 1], [0.1, 0.2, 0.3], [1, 1, 1], None),
        ([0, 0, 1, 1e6, 1e6], [0.1, 0.2, 0.3, 1e6, 1e6], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]),
        ([0, 0, 1, np.nan, np.nan], [0.1, 0.2, 0.3, np.nan, np.nan], [1, 1, 1, 0, 0], None),
        ([0, np.nan, 0, 1], [0.1, 99, 0.2, 0.3], [1, 0, 1, 1], None),
        ([np.nan, 0, 0, 1, 1], [np.nan, 0.1, 0.2, 0.3, np.inf], [0, 1, 1, 1, 0], [1, 1, 1, 1, 2]),
    ],
    ids=["plain", "padding of 1e6", "NaN inside the segment", "observation token", "prompt and neighbour"],
)
def test_gae_golden(rewards, values, mask, segment_ids):
    advantages, returns = golden_row(rewards, values, mask, segment_ids)
    assert_allclose(advantages, [0.82675, 0.765, 0.7], rtol=1e-6)
    assert_allclose(returns, [0.92675, 0.965, 1], rtol=1e-6)


def test_sequences_side_by_side_do_not_see_each_other():
    advantages, _ = golden_row([0, 0, 1, 5], [0.1, 0.2, 0.3, 2], [1, 1, 1, 1], [1, 1, 1, 2])
    assert_allclose(advantages, [0.82675, 0.765, 0.7, 3], rtol=1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.0), (0.97, 0.9)])
def test_gae_matches_the_oracle(gamma, lam):
    packed = rows.make(0, "rewards", "values")
    expected = oracle.gae(
        packed.arrays["rewards"], packed.arrays["values"], packed.mask, packed.segment_ids, gamma, lam
    )
    for result, value in zip(run_gae(packed, gamma, lam), expected, strict=True):
        assert result.dtype == jnp.float32
        assert_allclose(result, value, atol=3e-6)


def test_gae_in_float64_matches_the_oracle_in_value_and_gradient():
    packed = rows.make(1, "rewards", "values", "weights", dtype=np.float64)
    rewards, values, weights = (np.where(packed.mask, x, 0) for x in packed.arrays.values())

    def expected(x):
        advantages, returns = oracle.gae(rewards, x, packed.mask, packed.segment_ids, 0.97, 0.9)
        return float((weights * (advantages + returns**2)).sum())

    with jax.enable_x64(True):
        mask, ids = jnp.asarray(packed.mask), jnp.asarray(packed.segment_ids)

        def total(x):
            advantages, returns = gae(jnp.asarray(rewards), x, mask, ids, gamma=0.97, lam=0.9)
            return (weights * (advantages + returns**2)).sum()

        value, slope = jax.jit(jax.value_and_grad(total))(jnp.asarray(packed.arrays["values"]))
        assert_allclose(value, expected(values), rtol=1e-12)
        numeric = np.where(packed.mask, oracle.gradient(expected, values), 0)
        assert_allclose(slope, numeric, atol=1e-7)


@pytest.mark.parametrize("width", [12, 15])
def test_packed_and_padded_rows_agree(width):
    packed = rows.make(2, "rewards", "values")
    padded, places = rows.unpack(packed, width)
    for together, apart in zip(run_gae(packed), run_gae(padded), strict=True):
        assert_allclose(rows.repack(np.asarray(apart), places, packed.mask), together, atol=1e-6)


def test_permuted_rows_give_permuted_results():
    packed = rows.make(3, "rewards", "values")
    order = np.array([2, 0, 1])
    arrays = {name: x[order] for name, x in packed.arrays.items()}
    permuted = rows.Rows(packed.mask[order], packed.segment_ids[order], arrays)
    for result, moved in zip(run_gae(packed), run_gae(permuted), strict=True):
        assert_array_equal(result[order], moved)


def test_any_leading_shape_and_no_token_at_all():
    packed = rows.make(4, "rewards", "values")
    arrays = (packed.arrays["rewards"], packed.arrays["values"], packed.mask, packed.segment_ids)
    expected, _ = run_gae(packed)
    deep, _ = gae_jit(*(jnp.asarray(x)[:, None] for x in arrays), gamma=0.97, lam=0.9)
    assert_allclose(deep[:, 0], expected, atol=1e-6)
    nothing, _ = gae_jit(*map(jnp.asarray, (*arrays[:2], packed.mask & False, arrays[3])), gamma=1.0, lam=1.0)
    assert_array_equal(nothing, 0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**12 - 1), st.integers(0, 2**11 - 1), st.integers(0, 12), st.integers(0, 2**16))
def test_gae_of_any_mask_and_boundaries(mask_bits, boundaries, length, seed):
    steps = np.array([1] + [boundaries >> t & 1 for t in range(11)])
    ids = np.where(np.arange(12) < length, steps.cumsum(), 0).astype(np.int32)[None]
    mask = np.array([[bool(mask_bits >> t & 1) for t in range(12)]]) & (ids != 0)
    rng = np.random.default_rng(seed)
    rewards, values = (rows.spoil(rng.normal(size=(1, 12)), mask).astype(np.float32) for _ in range(2))
    result = run_gae(rows.Rows(mask, ids, {"rewards": rewards, "values": values}))
    for ours, value in zip(result, oracle.gae(rewards, values, mask, ids, 0.97, 0.9), strict=True):
        assert_allclose(ours, value, atol=3e-6)


def test_a_long_row_keeps_its_precision():
    rng = np.random.default_rng(0)
    values, ids = rng.normal(size=(1, 4096)).astype(np.float32), np.ones((1, 4096), np.int32)
    rewards, mask = np.zeros((1, 4096), np.float32), np.ones((1, 4096), bool)
    rewards[0, -1] = 1
    advantages, returns = gae_jit(*map(jnp.asarray, (rewards, values, mask, ids)), gamma=1.0, lam=1.0)
    assert_allclose(returns, 1, atol=1e-4)
    assert_allclose(advantages, 1 - values, atol=1e-4)


def test_rewards_land_on_the_last_response_token():
    ids = jnp.array([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    scores = jnp.where(ids != 0, jnp.array([[1.0], [2.0]]), jnp.nan)
    kl = jnp.full((2, 5), jnp.nan)
    result = token_rewards_jit(scores, jnp.where(ids != 0, 0, kl), 0.0, ids != 0, ids)
    assert_array_equal(result, [[0, 1, 0, 0, 0], [0, 0, 0, 0, 2]])


def test_the_penalty_is_minus_the_coefficient_times_the_log_ratio():
    kl = kl_estimate(jnp.array([[-1.0, -2]]), jnp.array([[-1.5, -1]]), "k1")
    result = token_rewards(jnp.ones((1, 2)), kl, 0.1, jnp.ones((1, 2), bool), jnp.ones((1, 2), jnp.int32))
    assert_allclose(result, [[-0.05, 1.1]], rtol=1e-6)


def test_garbage_outside_the_mask_does_not_reach_the_penalty():
    kl, mask, ids = jnp.array([[0.1, jnp.nan]]), jnp.array([[True, False]]), jnp.ones((1, 2), jnp.int32)

    def total(kl):
        return token_rewards(jnp.zeros((1, 2)), kl, 1.0, mask, ids).sum()

    value, slope = jax.value_and_grad(total)(kl)
    assert_allclose(value, -0.1)
    assert_array_equal(slope, [[-1, 0]])


def test_a_sequence_without_response_tokens_has_no_reward():
    ids = jnp.array([[1, 1, 2, 2, 0]])
    mask = jnp.array([[False, False, False, True, False]])
    kl = jnp.where(mask, 0, jnp.nan)
    result = token_rewards_jit(jnp.array([[7.0, 7, 1, 1, 0]]), kl, 0.0, mask, ids)
    assert_array_equal(result, [[0, 0, 0, 1, 0]])


def test_token_rewards_match_the_oracle():
    packed = rows.make(5, "scores", "kl")
    scores, kl = packed.arrays["scores"], packed.arrays["kl"]
    result = token_rewards_jit(
        *map(jnp.asarray, (scores, kl)), 0.3, *map(jnp.asarray, (packed.mask, packed.segment_ids))
    )
    assert_allclose(result, oracle.token_rewards(scores, kl, 0.3, packed.mask, packed.segment_ids), atol=1e-6)


def arguments(packed, *names):
    return [jnp.asarray(x) for x in (*(packed.arrays[name] for name in names), packed.mask, packed.segment_ids)]


@jax.jit
def token_estimators(rewards, baselines, energy, mask, segment_ids, group_ids):
    return {
        "reinforce_plus_plus": reinforce_plus_plus(rewards, mask, segment_ids, gamma=0.9),
        "remax": remax(rewards, baselines, mask, segment_ids),
        "optimal_token_baseline": optimal_token_baseline(rewards, energy, mask, segment_ids, group_ids),
    }


# sequences (row, id): (0, 1) and (0, 2) and (2, 1) are one group, (1, 1) is alone, (2, 2) has no token in the mask
GROUPS = np.array([[4, 4, 4, 4, 4, 4, 4, 4, 4, 1, 1, 0], [2] * 12, [4, 4, 4, 2, 2, 2] + [0] * 6], np.int32)


def expected_token_estimators(rewards, baselines, energy, mask, ids):
    to_go, discounted = (oracle.rewards_to_go(rewards, mask, ids, gamma) for gamma in (1.0, 0.9))
    return {
        "reinforce_plus_plus": (oracle.whiten(discounted, mask), discounted),
        "remax": (np.where(mask, to_go - baselines, 0), to_go),
        "optimal_token_baseline": (oracle.optimal_token_baseline(rewards, energy, mask, ids, GROUPS), to_go),
    }


def test_token_estimators_match_the_oracle_in_value_and_gradient():
    packed = rows.make(6, "rewards", "baselines", "energy", dtype=np.float64)
    packed.arrays["energy"] = np.abs(packed.arrays["energy"])
    weights = np.random.default_rng(0).normal(size=packed.mask.shape)

    def total(estimates):
        return sum((weights * advantages).sum() for advantages, _ in estimates.values())

    def expected_total(x):
        others = (packed.arrays["baselines"], packed.arrays["energy"], packed.mask, packed.segment_ids)
        return float(total(expected_token_estimators(x, *others)))

    with jax.enable_x64(True):
        args = [*arguments(packed, "rewards", "baselines", "energy"), jnp.asarray(GROUPS)]
        found = token_estimators(*args)
        for name, pair in expected_token_estimators(*packed.arrays.values(), packed.mask, packed.segment_ids).items():
            for ours, value in zip(found[name], pair, strict=True):
                assert_allclose(ours, value, atol=1e-10, err_msg=name)
        slope = jax.grad(lambda x: total(token_estimators(x, *args[1:])))(args[0])
        numeric = oracle.gradient(expected_total, packed.arrays["rewards"])
        assert_allclose(slope, np.where(packed.mask, numeric, 0), atol=1e-6)


def test_token_estimators_by_hand():
    """Two responses to one prompt, of 2 and 1 tokens, with scores 1 and 0; a third prompt's is alone."""
    ids = jnp.array([[1, 1, 2, 0], [1, 1, 1, 1]])
    mask = jnp.array([[True, True, True, False], [False, True, False, True]])
    rewards = jnp.array([[0.0, 1, 0, 9], [9, 0, 9, 2]])
    energy = jnp.array([[1.0, 5, 3, 9], [9, 1, 9, 1]])
    baselines = jnp.full((2, 4), 0.5)
    arrays = (rewards, baselines, energy, mask, ids, jnp.array([[0] * 4, [1] * 4]))
    padded = token_estimators(*(jnp.pad(x, ((0, 1), (0, 8))) for x in arrays))
    found = jax.tree.map(lambda x: x[:2, :4], padded)
    assert_allclose(found["remax"][0], [[0.5, 0.5, -0.5, 0], [0, 1.5, 0, 1.5]])
    assert_allclose(found["reinforce_plus_plus"][1], [[0.9, 1, 0, 0], [0, 1.8, 0, 2]], rtol=1e-6)
    # at the first tokens B = (1·1 + 0·3) / 4; the second token of the first response has nobody beside it
    assert_allclose(found["optimal_token_baseline"][0], [[0.75, 0, -0.25, 0], [0, 2, 0, 2]], atol=1e-6)


def test_token_estimators_of_nothing_are_0():
    nothing = [jnp.zeros((3, 12))] * 3 + [jnp.zeros((3, 12), bool), jnp.zeros((3, 12), jnp.int32)]
    for pair in token_estimators(*nothing, jnp.asarray(GROUPS)).values():
        for x in pair:
            assert_array_equal(x, 0)
