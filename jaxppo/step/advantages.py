"""Advantages and returns of a packed batch, by the estimator that the config names."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo.config import AlgorithmConfig
from jaxppo.rl import advantages as estimators
from jaxppo.rl.masked import keep, segment_sum, whiten
from jaxppo.step.state import PackedBatch

Tokens = Float[Array, "M K B T"]


def estimate_advantages(
    algorithm: AlgorithmConfig,
    batch: PackedBatch,
    rewards: Tokens,
    penalty: Tokens,
    values: Tokens | None,
    energy: Tokens | None,
) -> tuple[Tokens, Tokens]:
    """(advantages, returns) as the losses take them. `rewards` holds scores and penalties by token, `penalty` the
    latter alone; `values` are None without a critic, and `energy` is of optimal_token_baseline alone.

    Whitened over all tokens of the batch: gae, reinforce_plus_plus and its baseline. Of the estimators by response
    every token gets its response's advantage, which is its return as well.
    """
    mask, segments = batch.mask, batch.segment_ids
    match algorithm.adv_estimator:
        case "gae":
            assert values is not None  # there is a critic
            raw, returns = estimators.gae(rewards, values, mask, segments, gamma=algorithm.gamma, lam=algorithm.lam)
            return whiten(raw, mask), returns
        case "reinforce_plus_plus":
            return estimators.reinforce_plus_plus(rewards, mask, segments, gamma=algorithm.gamma)
        case "remax":
            return estimators.remax(rewards, batch.baselines, mask, segments)
        case "optimal_token_baseline":
            assert energy is not None
            return estimators.optimal_token_baseline(rewards, energy, mask, segments, batch.group_ids)
    advantages = _by_response(algorithm, batch, penalty)
    if algorithm.adv_estimator == "reinforce_plus_plus_baseline":
        advantages = whiten(advantages, mask)
    return advantages, advantages


def _by_response(algorithm: AlgorithmConfig, batch: PackedBatch, penalty: Tokens) -> Tokens:
    """An estimator that compares the responses of a group, at each token of the mask.

    A response counts in its group even where none of its tokens is in the mask.
    """
    mask, segments = batch.mask, batch.segment_ids
    # of each response the batch's flat arrays have one token: its first
    first = (batch.positions == 0) & (segments != 0)
    groups = jnp.where(first, batch.group_ids, -1).ravel()
    scores = keep(batch.scores - segment_sum(penalty, mask, segments), first).ravel()
    match algorithm.adv_estimator:
        case "grpo":
            result = estimators.grpo(scores, groups, norm_by_std=algorithm.norm_adv_by_std_in_grpo)
        case "grpo_passk":
            result = estimators.grpo_passk(scores, groups, norm_by_std=algorithm.norm_adv_by_std_in_grpo)
        case "rloo":
            result = estimators.rloo(scores, groups)
        case "reinforce_plus_plus_baseline":
            result = estimators.reinforce_plus_plus_baseline(scores, groups)
        case "opo":
            lengths = segment_sum(mask.astype(scores.dtype), mask, segments).ravel()
            result = estimators.opo(scores, groups, lengths)
        case "gpg":
            result = estimators.gpg(scores, groups)
        case _:
            raise ValueError(f"adv_estimator {algorithm.adv_estimator!r} is none that compares responses")
    return keep(segment_sum(result.reshape(mask.shape), first, segments), mask)
