"""Rollout correction of a batch: weights for what the engine sampled, and what is left out as too far off."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxppo.config import RolloutCorrectionConfig
from jaxppo.rl.correction import accepted, importance_weights
from jaxppo.rl.masked import keep, masked_mean, masked_variance, segment_sum
from jaxppo.rl.segments import last_tokens
from jaxppo.step.state import PackedBatch

Tokens = Float[Array, "M K B T"]


def correct(
    config: RolloutCorrectionConfig, batch: PackedBatch, train_logp: Tokens | None
) -> tuple[PackedBatch, Tokens | None, dict[str, Array]]:
    """(the batch without the rejected tokens, weights of the policy loss or None, verl's rollout_corr/* metrics).

    Rejected tokens leave the mask before rewards and advantages are computed: a score then lies on the last token that
    is left. Weights are of the whole sequence as it was sampled. With everything off the batch is the given one.
    """
    metrics: dict[str, Array] = {}
    if train_logp is None:  # nothing needs it, so nothing is corrected
        return batch, None, metrics
    weights, mask, segments = None, batch.mask, batch.segment_ids
    pair = (train_logp, batch.rollout_logp, mask, segments)
    if config.rollout_is != "none":
        weights = importance_weights(*pair, level=config.rollout_is, cap=config.threshold)
        metrics |= {f"rollout_is_{name}": x for name, x in _of_weights(weights, mask, config.threshold).items()}
    for kind, lower, upper in config.rejections:
        stays = accepted(*pair, kind=kind, lower=lower, upper=upper)
        metrics[f"rollout_rs_{kind}_masked_fraction"] = 1 - masked_mean(stays.astype(train_logp.dtype), batch.mask)
        mask = mask & stays
    if config.rejections:
        metrics |= _of_rejection(batch, mask)
    if weights is not None or config.rejections:
        metrics |= _of_mismatch(*pair)
    batch = dataclasses.replace(batch, mask=mask) if config.rejections else batch
    return batch, weights, {f"rollout_corr/{name}": x for name, x in metrics.items()}


def _of_weights(weights: Tokens, mask: Bool[Array, "M K B T"], cap: float) -> dict[str, Array]:
    mean = masked_mean(weights, mask)
    return {
        "mean": mean,
        "max": jnp.max(weights, where=mask, initial=-jnp.inf),
        "min": jnp.min(weights, where=mask, initial=jnp.inf),
        "std": jnp.sqrt(masked_variance(weights, mask)),
        "eff_sample_size": mean**2 / jnp.maximum(masked_mean(weights**2, mask), 1e-8),
        "ratio_fraction_high": masked_mean((weights >= cap).astype(weights.dtype), mask),
    }


def _of_rejection(batch: PackedBatch, mask: Bool[Array, "M K B T"]) -> dict[str, Array]:
    """The share of tokens, and of sequences with any token rejected."""
    rejected = (batch.mask & ~mask).astype(batch.scores.dtype)
    sequences = last_tokens(batch.mask, batch.segment_ids)
    touched = segment_sum(rejected, batch.mask, batch.segment_ids) > 0
    return {
        "rollout_rs_masked_fraction": masked_mean(rejected, batch.mask),
        "rollout_rs_seq_masked_fraction": masked_mean(touched.astype(rejected.dtype), sequences),
    }


def _of_mismatch(train_logp: Tokens, rollout_logp: Tokens, mask: Array, segments: Array) -> dict[str, Array]:
    """How far trainer and engine are apart, over all sampled tokens; log-perplexities are means over sequences."""
    r = jnp.clip(keep(train_logp, mask) - keep(rollout_logp, mask), -20, 20)
    sequences = last_tokens(mask, segments)
    lengths = jnp.maximum(segment_sum(jnp.ones_like(r), mask, segments), 1)
    training, rollout = (-segment_sum(x, mask, segments) / lengths for x in (train_logp, rollout_logp))
    total = jnp.clip(segment_sum(r, mask, segments), -20, 20)
    return {
        "kl": masked_mean(-r, mask),
        "k3_kl": masked_mean(jnp.expm1(r) - r, mask),
        "training_log_ppl": masked_mean(training, sequences),
        "rollout_log_ppl": masked_mean(rollout, sequences),
        "log_ppl_diff": masked_mean(training - rollout, sequences),
        "ppl_ratio": masked_mean(jnp.exp(training - rollout), sequences),
        "chi2_token": masked_mean(jnp.exp(2 * r), mask) - 1,
        "chi2_seq": masked_mean(jnp.exp(2 * total), sequences) - 1,
    }
