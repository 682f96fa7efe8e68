"""The losses: goldens, the oracle in value and gradient, and independence of any split into microbatches."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from jaxppo.rl.kl import kl_estimate
from jaxppo.rl.losses import aggregate, entropy_from_logits, explained_variance, policy_loss, value_loss
from tests import oracle
from tests.rl import rows

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
entropy_jit = jax.jit(entropy_from_logits)
aggregate_jit = jax.jit(aggregate, static_argnames=("mode", "norm_length"))
CLIPS = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}


@jax.jit
def clipped_loss(logp, old_logp, advantages, mask):
    return policy_loss(logp, old_logp, advantages, mask, **CLIPS)


@jax.jit
def slope(logp, old_logp, advantages, mask):
    return jax.grad(lambda x: policy_loss(x, old_logp, advantages, mask, **CLIPS).loss.sum())(logp)


@jax.jit
def clipped_value_loss(values, old_values, returns, mask):
    return value_loss(values, old_values, returns, mask, clip=0.2)


def one_by_one(ratios, advantages):
    """(loss, gradient by logp, result) of tokens with these ratios."""
    logp = jnp.log(jnp.array(ratios, jnp.float32))
    arrays = (logp, jnp.zeros_like(logp), jnp.array(advantages, jnp.float32), jnp.ones(logp.shape, bool))
    result = clipped_loss(*arrays)
    return result.loss, slope(*arrays), result


def test_policy_loss_goldens():
    #        inside   high clip   low clip   high, A < 0   dual clip   low, A > 0
    ratios = [1.1, 2.0, 0.5, 2.0, 5.0, 0.5]
    advantages = [1.0, 1.0, -1.0, -1.0, -1.0, 1.0]
    loss, gradient, result = one_by_one(ratios, advantages)
    assert_allclose(loss, [-1.1, -1.3, 0.8, 2.0, 3.0, -0.5], rtol=1e-6)
    assert_allclose(gradient, [-1.1, 0, 0, 2.0, 0, -0.5], rtol=1e-6)
    assert result.pg_clipfrac == 2
    assert result.pg_clipfrac_lower == 1
    assert_allclose(result.ppo_kl, -np.log(ratios).sum(), rtol=1e-6)
    assert result.count == 6


def test_equal_policies_have_ratio_1_exactly_and_the_full_gradient():
    logp = jnp.array([-0.3, -17.123, -1e-6])
    advantages = jnp.array([1.5, -2.5, 0.0])
    for clips in (CLIPS, {"clip_low": 0.0, "clip_high": 0.0, "clip_c": 3.0}):
        mask = jnp.ones(3, bool)
        result = policy_loss(logp, logp, advantages, mask, **clips)
        assert_array_equal(result.loss, -advantages)
        assert result.ppo_kl == result.pg_clipfrac == result.pg_clipfrac_lower == 0
        gradient = jax.grad(lambda x, c=clips, m=mask: policy_loss(x, logp, advantages, m, **c).loss.sum())(logp)
        assert_array_equal(gradient, -advantages)


def test_far_apart_policies_have_finite_losses_and_gradients():
    logp = jnp.array([200.0, -200, 200, -200])
    arrays = (logp, jnp.zeros(4), jnp.array([1.0, 1, -1, -1]), jnp.ones(4, bool))
    result = clipped_loss(*arrays)
    assert_allclose(result.loss, [-1.3, 0, 3, 0.8], atol=1e-6)
    assert_allclose(result.ppo_kl, 0, atol=1e-6)
    assert jnp.isfinite(slope(*arrays)).all()


@pytest.mark.parametrize("clip_c", [1.0, 0.5, -3.0, float("nan")])
def test_a_dual_clip_of_at_most_1_is_refused(clip_c):
    one = jnp.zeros(1)
    with pytest.raises(ValueError, match="clip_c"):
        policy_loss(one, one, one, one == 0, clip_low=0.2, clip_high=0.2, clip_c=clip_c)


def test_policy_loss_matches_the_oracle_in_value_and_gradient():
    packed = rows.make(0, "logp", "old_logp", "advantages", dtype=np.float64)
    logp, old, advantages = packed.arrays.values()

    def expected(x):
        def token(*args):
            return oracle.policy_loss_token(*args, 0.2, 0.3, 3.0)

        return oracle.per_token(token, packed.mask, x, old, advantages)

    with jax.enable_x64(True):
        arrays = tuple(map(jnp.asarray, (logp, old, advantages, packed.mask)))
        result = clipped_loss(*arrays)
        assert_allclose(result.loss, expected(logp), rtol=1e-12)
        numeric = np.where(packed.mask, oracle.gradient(lambda x: float(expected(x).sum()), logp), 0)
        assert_allclose(slope(*arrays), numeric, rtol=1e-6, atol=1e-8)
        assert 0 < result.pg_clipfrac < result.count == packed.mask.sum()
        assert_allclose(result.ppo_kl, (old - logp)[packed.mask].sum(), rtol=1e-12)


@pytest.mark.parametrize(
    ("value", "old", "ret", "loss", "clipped"),
    [
        (2.0, 1.0, 0.0, 2.0, 0),
        (1.1, 1.0, 0.0, 0.605, 0),
        (2.0, 1.0, 3.0, 1.62, 1),
        (0.0, 1.0, 0.0, 0.32, 1),
        (1.0, 1.0, 1.0, 0.0, 0),
    ],
)
def test_value_loss_goldens(value, old, ret, loss, clipped):
    result = clipped_value_loss(jnp.array([value]), jnp.array([old]), jnp.array([ret]), jnp.array([True]))
    assert_allclose(result.loss, [loss], rtol=1e-6)
    assert result.vf_clipfrac == clipped
    assert result.vpred == np.float32(value)
    assert result.count == 1


def test_value_loss_matches_the_oracle_in_value_and_gradient():
    packed = rows.make(1, "values", "old_values", "returns", dtype=np.float64)
    values, old, returns = packed.arrays.values()

    def expected(x):
        def token(*args):
            return oracle.value_loss_token(*args, 0.2)

        return oracle.per_token(token, packed.mask, x, old, returns)

    with jax.enable_x64(True):
        others = tuple(map(jnp.asarray, (old, returns, packed.mask)))
        result = clipped_value_loss(jnp.asarray(values), *others)
        assert_allclose(result.loss, expected(values), rtol=1e-12)
        gradient = jax.grad(lambda x: clipped_value_loss(x, *others).loss.sum())(jnp.asarray(values))
        numeric = np.where(packed.mask, oracle.gradient(lambda x: float(expected(x).sum()), values), 0)
        assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-8)
        assert_allclose(result.vpred, values[packed.mask].sum(), rtol=1e-12)


def test_entropy_of_impossible_tokens_is_finite_in_value_and_gradient():
    logits = jnp.array([1.0, 2.0, -jnp.inf])
    assert_allclose(entropy_from_logits(logits), 0.582203, atol=1e-6)
    gradient = jax.grad(entropy_from_logits)(logits)
    assert jnp.isfinite(gradient).all()
    assert gradient[2] == 0


def test_entropy_matches_the_oracle_in_value_and_gradient():
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)) * 3
    logits[0, 0, 1] = -np.inf
    with jax.enable_x64(True):
        result = entropy_from_logits(jnp.asarray(logits))
        assert_allclose(result, np.apply_along_axis(oracle.entropy, -1, logits), rtol=1e-12)
        gradient = jax.grad(lambda x: entropy_from_logits(x).sum())(jnp.asarray(logits))
    numeric = oracle.gradient(lambda x: float(np.apply_along_axis(oracle.entropy, -1, x).sum()), logits)
    assert_allclose(gradient, numeric, atol=1e-7)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=5, max_size=5))
def test_entropy_lies_between_0_and_log_v(logits):
    entropy = entropy_jit(jnp.array(logits, jnp.float32))
    assert 0 <= entropy <= np.log(5) * (1 + 1e-6)


def aggregated(packed, mode, split=None, **kwargs):
    """The minibatch's loss, as the update forms it from microbatches of rows."""
    splits = [slice(None)] if split is None else split
    arrays = tuple(jnp.asarray(a) for a in (packed.arrays["loss"], packed.mask, packed.segment_ids))
    parts = [aggregate_jit(*(a[rows_] for a in arrays), mode=mode, **kwargs) for rows_ in splits]
    return sum(s for s, _ in parts) / sum(n for _, n in parts)


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_does_not_depend_on_microbatches_packing_or_padding(mode):
    packed = rows.make(2, "loss")
    loss, mask, ids = packed.arrays["loss"], packed.mask, packed.segment_ids
    expected = oracle.aggregate(loss, mask, ids, mode, norm_length=7)
    assert_allclose(aggregated(packed, mode, norm_length=7), expected, rtol=1e-5)
    one_row_each = [slice(i, i + 1) for i in range(3)]
    assert_allclose(aggregated(packed, mode, one_row_each, norm_length=7), expected, rtol=1e-5)
    padded, _ = rows.unpack(packed, 14)
    assert_allclose(aggregated(padded, mode, norm_length=7), expected, rtol=1e-5)
    dummy = rows.Rows(
        np.concatenate([mask, mask[:1] & False]),
        np.concatenate([ids, ids[:1] * 0]),
        {"loss": np.concatenate([loss, np.full_like(loss[:1], np.nan)])},
    )
    assert_allclose(aggregated(dummy, mode, norm_length=7), expected, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_each_tokens_weight(mode):
    packed = rows.make(3, "loss", dtype=np.float64)
    loss, mask, ids = packed.arrays["loss"], packed.mask, packed.segment_ids
    with jax.enable_x64(True):

        def total(x):
            s, n = aggregate_jit(x, jnp.asarray(mask), jnp.asarray(ids), mode=mode, norm_length=7)
            return s / n

        gradient = jax.grad(total)(jnp.asarray(loss))
    numeric = oracle.gradient(lambda x: oracle.aggregate(x, mask, ids, mode, 7), loss)
    assert_allclose(gradient, np.where(mask, numeric, 0), atol=1e-8)


@pytest.mark.parametrize("mode", MODES)
def test_no_token_gives_no_loss_and_no_nan(mode):
    packed = rows.make(4, "loss")
    nothing = jnp.zeros(packed.mask.shape, bool)
    arrays = (nothing, jnp.asarray(packed.segment_ids))
    loss = jnp.asarray(packed.arrays["loss"])
    assert aggregate_jit(loss, *arrays, mode=mode, norm_length=7) == (0, 0)
    gradient = jax.grad(lambda x: aggregate_jit(x, *arrays, mode=mode, norm_length=7)[0])(loss)
    assert_array_equal(gradient, 0)


def test_aggregation_goldens():
    loss, mask = jnp.array([[1.0, 2, 3, 6]]), jnp.array([[True, True, False, True]])
    ids = jnp.array([[1, 1, 2, 2]])
    expected = {
        "token-mean": (9, 3),
        "seq-mean-token-sum": (9, 2),
        "seq-mean-token-mean": (7.5, 2),
        "seq-mean-token-sum-norm": (3, 2),
    }
    for mode, sum_and_count in expected.items():
        assert aggregate_jit(loss, mask, ids, mode=mode, norm_length=3) == sum_and_count


def test_two_responses_of_unequal_length_in_any_microbatches():
    """Lengths 1 and 3, advantages +1 and -1, ratio 1: the token mean is (-1 + 3) / 4, not the mean of means 0."""
    ids = jnp.array([[1, 0, 0], [1, 1, 1], [0, 0, 0]])
    advantages, logp = jnp.array([[1.0], [-1], [0]]) * jnp.ones((3, 3)), jnp.full((3, 3), -0.7)

    @jax.jit
    def step(logp, advantages, ids):
        def total(x):
            loss = policy_loss(x, logp, advantages, ids != 0, **CLIPS).loss
            return aggregate(loss, ids != 0, ids, "token-mean")

        return jax.value_and_grad(total, has_aux=True)(logp)

    for cuts in ([0, 2], [0, 1, 2], [0, 1, 3]):  # together, apart, and with a row of padding
        pieces = [slice(*cut) for cut in itertools.pairwise(cuts)]
        parts = [step(logp[piece], advantages[piece], ids[piece]) for piece in pieces]
        count = sum(n for (_, n), _ in parts)
        gradient = np.concatenate([g for _, g in parts]) / count
        assert_allclose(sum(s for (s, _), _ in parts) / count, 0.5)
        assert_allclose(gradient[:2], [[-0.25, 0, 0], [0.25, 0.25, 0.25]])
        assert_array_equal(gradient[2:], 0)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows_apart = NamedSharding(mesh, PartitionSpec("data"))
    (total, count), gradient = step(*jax.device_put((logp[:2], advantages[:2], ids[:2]), rows_apart))
    assert len(gradient.sharding.device_set) == 2
    assert_allclose(total / count, 0.5)
    assert_allclose(gradient / count, [[-0.25, 0, 0], [0.25, 0.25, 0.25]])


def test_unknown_modes_and_missing_lengths_are_refused():
    one = jnp.ones(1)
    arrays = (one, one == 1, jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match="seq-mean-token-mean"):
        aggregate(*arrays, "mean")
    for length in (None, 0):
        with pytest.raises(ValueError, match="norm_length"):
            aggregate(*arrays, "seq-mean-token-sum-norm", norm_length=length)


def test_metrics_lie_in_their_ranges_at_any_width():
    packed = rows.make(5, "logp", "old_logp", "advantages")
    wide, _ = rows.unpack(packed, 20)
    results = [clipped_loss(*map(jnp.asarray, (*r.arrays.values(), r.mask))) for r in (packed, wide)]
    for result in results:
        assert 0 <= result.pg_clipfrac <= result.count
        assert 0 <= result.pg_clipfrac_lower <= result.count
    for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "count"):
        assert_allclose(getattr(results[0], name), getattr(results[1], name), rtol=1e-5)


def test_the_mean_over_sequences_of_their_token_mean_kl():
    """What the adaptive controller is fed: (0.2 + 0.5) / 2, where the mean over tokens is 0.3."""
    logp, ids = jnp.array([[0.1, 0.3, 0.5, jnp.nan]]), jnp.array([[1, 1, 2, 0]])
    kl = kl_estimate(logp, jnp.zeros((1, 4)), "k1")
    total, count = aggregate(kl, ids != 0, ids, "seq-mean-token-mean")
    assert_allclose(total / count, 0.35, rtol=1e-6)


def test_explained_variance():
    mask = jnp.array([True, True, True, False])
    returns = jnp.array([1.0, 2, 3, jnp.nan])
    assert_allclose(explained_variance(returns, returns, mask), 1)
    assert_allclose(explained_variance(jnp.zeros(4), returns, mask), 1 - 1 / 1.00001, atol=1e-6)
    assert_allclose(explained_variance(-returns, returns, mask), 1 - 4 / 1.00001, atol=1e-5)
    constant = jnp.full(4, 0.1)
    assert_allclose(explained_variance(constant, constant, mask), 1)
    assert jnp.isfinite(explained_variance(returns, constant, mask))
    assert jnp.isfinite(explained_variance(returns, returns, mask & False))
    assert jnp.isfinite(explained_variance(returns, returns, jnp.arange(4) < 1))
