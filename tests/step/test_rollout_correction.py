"""Importance weights enter the policy loss as factors, and only where they are asked for."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.config import AlgorithmConfig, RolloutCorrectionConfig
from jaxppo.step.score import make_experience
from jaxppo.step.state import microbatch
from jaxppo.step.update import make_actor_loss
from tests.tiny import pad, random_rollouts, tiny_config, tiny_model


def experience(gap, **correction):
    """Of a batch whose trainer finds every token exp(gap) times as probable as the engine did."""
    config = dataclasses.replace(
        tiny_config(), algorithm=AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(**correction))
    )
    batch = pad(random_rollouts(4), 10, 4)
    arrays = {f.name: jnp.asarray(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
    batch = batch.replace(**arrays)
    old = jnp.where(batch.mask, batch.rollout_logp + gap, 0)
    zeros = jnp.zeros_like(old)
    return make_experience(config, jnp.float32(0), batch, old, old, zeros, zeros)


def test_it_is_off_by_default():
    assert experience(0.5).importance is None


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_and_their_metrics(level):
    e = experience(np.log(1.1), rollout_is=level, threshold=1.3)
    lengths = e.batch.mask.sum(-1, keepdims=True) if level == "sequence" else 1
    expected = jnp.where(e.batch.mask, jnp.minimum(1.1**lengths, 1.3), 0)
    np.testing.assert_allclose(e.importance, expected, rtol=1e-5)
    assert float(e.metrics["rollout_corr/rollout_is_max"]) == pytest.approx(float(expected.max()), rel=1e-5)
    mean = float(expected.sum() / e.batch.mask.sum())
    assert float(e.metrics["rollout_corr/rollout_is_mean"]) == pytest.approx(mean, rel=1e-5)


def test_rejection_takes_tokens_out_before_the_advantages():
    """Ratios of 1.1 a token: only sequences of up to 2 tokens are within 1.25 in all; metrics tell of the rest."""
    e = experience(np.log(1.1), rollout_rs=("seq_sum_k1", "token_k3"), rollout_rs_threshold=("0.8_1.25", "0.01"))
    sampled = np.asarray(pad(random_rollouts(4), 10, 4).mask)
    lengths = sampled.sum(-1, keepdims=True)
    np.testing.assert_array_equal(e.batch.mask, sampled & (lengths <= 2))
    assert e.importance is None
    assert 0 < e.batch.mask.sum() < sampled.sum()
    share = 1 - float(e.batch.mask.sum()) / sampled.sum()
    assert float(e.metrics["rollout_corr/rollout_rs_masked_fraction"]) == pytest.approx(share, rel=1e-5)
    assert float(e.metrics["rollout_corr/rollout_rs_token_k3_masked_fraction"]) == pytest.approx(0, abs=1e-6)
    assert float(e.metrics["rollout_corr/rollout_rs_seq_masked_fraction"]) == pytest.approx((lengths > 2).mean())
    assert float(e.metrics["rollout_corr/kl"]) == pytest.approx(-np.log(1.1), rel=1e-4)
    assert float(e.metrics["rollout_corr/chi2_token"]) == pytest.approx(1.1**2 - 1, rel=1e-4)
    assert float(e.metrics["rollout_corr/ppl_ratio"]) == pytest.approx(1 / 1.1, rel=1e-4)
    # the alarm of mismatch still speaks of everything that was sampled
    assert float(e.metrics["training/rollout_logp_diff_mean"]) == pytest.approx(np.log(1.1), rel=1e-4)
    np.testing.assert_array_equal(np.where(e.batch.mask, 0, e.advantages), 0)


def test_the_policy_loss_is_weighted_token_by_token():
    model = tiny_model()
    whole = experience(np.log(0.5), rollout_is="token")
    loss = make_actor_loss(tiny_config(), model)
    micro = microbatch(whole, 0, 0)
    weighted, (count, _) = loss(model.params, micro)
    plain, (same_count, _) = loss(model.params, micro.replace(importance=None))
    np.testing.assert_allclose(weighted, 0.5 * plain, rtol=1e-5)
    assert abs(float(plain)) > 1e-3
    assert count == same_count
