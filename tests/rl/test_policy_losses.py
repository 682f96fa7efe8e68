"""The further policy losses: goldens by hand, the oracle in value and gradient, edge cases, packing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxppo.rl import policy_losses
from jaxppo.rl.losses import aggregate
from tests import oracle
from tests.rl import rows

LOW, HIGH = 0.2, 0.3
LOSSES = {
    "gspo": lambda a, ids, chosen: policy_losses.gspo(*a, ids, clip_low=LOW, clip_high=HIGH),
    "sapo": lambda a, ids, chosen: policy_losses.sapo(*a, tau_pos=1.0, tau_neg=1.05),
    "geo_mean": lambda a, ids, chosen: policy_losses.geo_mean(*a, ids, clip_low=LOW, clip_high=HIGH),
    "cispo": lambda a, ids, chosen: policy_losses.cispo(*a, clip_low=LOW, clip_high=HIGH),
    "gpg": lambda a, ids, chosen: policy_losses.gpg(*a),
    "clip_cov": lambda a, ids, chosen: policy_losses.clip_cov(*a, chosen, clip_low=LOW, clip_high=HIGH),
    "kl_cov": lambda a, ids, chosen: policy_losses.kl_cov(*a, chosen, kl_coef=0.5),
}


@partial(jax.jit, static_argnums=0)
def run(name, logp, old_logp, advantages, mask, segment_ids, chosen):
    return LOSSES[name]((logp, old_logp, advantages, mask), segment_ids, chosen)


def mean_over_sequences(name, *args):
    total, count = aggregate(run(name, *args).loss, args[3], args[4], "seq-mean-token-mean")
    return total / count


gradient = jax.jit(jax.grad(mean_over_sequences, argnums=1), static_argnums=0)


def packed(seed=0, dtype=np.float64):
    """Log-ratios on both sides of every bound; tokens 3, 6, 9 ... are chosen."""
    r = rows.make(seed, "logp", "old", "advantages", dtype=dtype)
    r.arrays["old"] = (r.arrays["logp"] + 0.4 * r.arrays["old"]).astype(dtype)
    chosen = r.mask & (np.arange(r.mask.size).reshape(r.mask.shape) % 3 == 0)
    return r, [*r.arrays.values(), r.mask, r.segment_ids, chosen]


def token_by_definition(name, logp, old, a, chosen):
    r = np.exp(logp - old)
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return -a * 4 / tau / (1 + np.exp(-tau * (r - 1)))
    if name == "gpg":
        return -a * logp
    if name == "clip_cov":
        return 0.0 if chosen else max(-a * r, -a * min(max(r, 1 - LOW), 1 + HIGH))
    if name == "kl_cov":
        return -a * r + (0.5 * abs(logp - old) if chosen else 0.0)
    raise ValueError(name)


@pytest.mark.parametrize("name", [n for n in LOSSES if n != "cispo"])
def test_the_oracle_agrees_in_value_and_gradient(name):
    _, args = packed()
    logp, old, advantages, mask, ids, chosen = args
    with_tokens = sum(map(bool, oracle.sequences(mask, ids)))

    def expected(x):
        if name in ("gspo", "geo_mean"):
            losses = oracle.policy_loss_of_sequences(x, old, advantages, mask, ids, name, low=LOW, high=HIGH)
            return float(losses.sum()) / with_tokens
        losses = oracle.per_token(partial(token_by_definition, name), mask, x, old, advantages, chosen)
        return oracle.aggregate(losses, mask, ids, "seq-mean-token-mean", 1)

    with jax.enable_x64(True):
        found = jax.jit(mean_over_sequences, static_argnums=0)(name, *map(jnp.asarray, args))
        assert_allclose(found, expected(logp), rtol=1e-10)
        slope = np.asarray(gradient(name, *map(jnp.asarray, args)))
    by_paper = gspo_gradient(logp, old, advantages, mask, ids) / with_tokens
    numeric = by_paper if name == "gspo" else np.where(mask, oracle.gradient(expected, logp), 0)
    assert_allclose(slope, numeric, atol=1e-8)


def gspo_gradient(logp, old, advantages, mask, ids):
    """By the paper's equation 17 a token's gradient goes through its own log-probability alone."""
    result = np.zeros(mask.shape)
    for tokens in oracle.sequences(mask, ids):
        for i in tokens:
            s, a = np.exp(np.mean([logp[j] - old[j] for j in tokens])), advantages[i]
            if -a * s >= -a * min(max(s, 1 - LOW), 1 + HIGH):
                result[i] = -a * s / len(tokens)
    return result


def test_cispo_by_definition():
    """The weight is a constant: the gradient is -w A."""
    _, args = packed()
    logp, old, advantages, mask, _, _ = args
    weight = np.clip(np.exp(logp - old), 1 - LOW, 1 + HIGH)
    with jax.enable_x64(True):
        arrays = list(map(jnp.asarray, args))
        assert_allclose(run("cispo", *arrays).loss, np.where(mask, -weight * advantages * logp, 0), rtol=1e-10)
        slope = jax.grad(lambda x: run("cispo", x, *arrays[1:]).loss.sum())(arrays[0])
    assert_allclose(slope, np.where(mask, -weight * advantages, 0), rtol=1e-10)


GOLDENS = {
    # two tokens of one sequence, ratios 2 and 1/2, A = 1 and -1, logp = -1 and -2; the second is chosen
    "gspo": ([-1, 1], 0, 0),
    "sapo": ([-4 / (1 + np.exp(-1)), 4 / 1.05 / (1 + np.exp(0.525))], 0, 0),
    "geo_mean": ([0, 0], 1, 1),
    "cispo": ([1.3, -0.8 * 2], 2, 0),
    "gpg": ([1, -2], 0, 0),
    "clip_cov": ([-1.3, 0], 1, 0),
    "kl_cov": ([-2, 0.5 + 0.5 * np.log(2)], 0, 0),
}


def golden_rows(*columns):
    """Padded to the shape of the other float32 tests."""
    out = [np.zeros((3, 12), np.float32) for _ in columns]
    for x, column in zip(out, columns, strict=True):
        x[0, : len(column)] = column
    return list(map(jnp.asarray, out))


@pytest.mark.parametrize("name", LOSSES)
def test_goldens(name):
    logp, old, advantages, ones, chosen = golden_rows(
        [-1, -2], [-1 - np.log(2), -2 + np.log(2)], [1, -1], [1, 1], [0, 1]
    )
    found = run(name, logp, old, advantages, ones == 1, ones.astype(int), chosen == 1)
    loss, clipped, clipped_below = GOLDENS[name]
    assert_allclose(found.loss[0, :2], loss, rtol=1e-5, atol=1e-6)
    assert (found.pg_clipfrac, found.pg_clipfrac_lower, found.count) == (clipped, clipped_below, 2)
    assert_allclose(found.ppo_kl, 2 * np.log(2) if name == "kl_cov" else 0, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_an_unchanged_policy_has_the_policy_gradient(name):
    """-A for every token, whatever the loss; one advantage for the whole sequence, as GRPO's."""
    logp, advantages, ones, _ = golden_rows([-1, -2, -3], [0.7] * 3, [1] * 3, [0])
    args = (logp, logp, advantages, ones == 1, ones.astype(int), ones == 2)
    found = run(name, *args)
    assert found.pg_clipfrac == found.pg_clipfrac_lower == found.ppo_kl == 0
    assert_allclose(gradient(name, *args)[0, :3], [-0.7 / 3] * 3, rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_far_ratios_and_garbage_outside_the_mask_stay_finite(name):
    for sign in (1, -1):
        _, args = packed(1, np.float32)
        args[0] = np.where(args[3], args[0] + sign * 1e3, np.nan).astype(np.float32)
        arrays = list(map(jnp.asarray, args))
        assert jnp.isfinite(run(name, *arrays).loss).all()
        slope = gradient(name, *arrays)
        assert jnp.isfinite(slope).all()
        assert_array_equal(slope[~args[3]], 0)


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_in_the_mask_is_0(name):
    _, args = packed(1, np.float32)
    arrays = list(map(jnp.asarray, args))
    found = run(name, *arrays[:3], arrays[3] & False, *arrays[4:])
    assert found.count == found.pg_clipfrac == found.ppo_kl == 0
    assert_array_equal(found.loss, 0)


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_packing_does_not_matter(name):
    r, args = packed(2, np.float32)
    alone, places = rows.unpack(r, 12)
    chosen = alone.mask & False
    apart = run(name, *map(jnp.asarray, (*alone.arrays.values(), alone.mask, alone.segment_ids, chosen))).loss
    together = run(name, *map(jnp.asarray, args)).loss
    assert_allclose(rows.repack(np.asarray(apart), places, r.mask), together, rtol=1e-5, atol=1e-6)


def test_covariance_and_what_is_chosen_by_it():
    logp, advantages, ones = golden_rows([-1, -2, -3, -6], [4, 0, -2, -2], [1] * 4)
    mask = ones == 1
    cov = policy_losses.covariance(logp, advantages, mask)
    assert_allclose(cov[0, :5], [8, 0, 0, 6, 0], atol=1e-6)
    greatest = policy_losses.choose_kl_cov(cov, mask, ratio=0.5)
    assert_array_equal(np.nonzero(greatest[0])[0], [0, 3])
    assert policy_losses.choose_kl_cov(cov, mask, ratio=1e-6).sum() == 1
    assert policy_losses.choose_kl_cov(cov, mask & False, ratio=1.0).sum() == 0
    keys = jax.random.split(jax.random.key(0), 64)
    draws = np.array(
        [policy_losses.choose_clip_cov(k, cov, mask, ratio=0.25, lower=1.0, upper=9.0)[0] for k in keys[:16]]
    )
    assert_array_equal(draws.sum(1), 1)
    assert set(np.nonzero(draws)[1]) == {0, 3}
    few = policy_losses.choose_clip_cov(keys[0], cov, mask, ratio=1.0, lower=1.0, upper=7.0)
    assert_array_equal(np.nonzero(few[0])[0], [3])
