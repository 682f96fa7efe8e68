"""Everything that the update must not change: log-probabilities, values, rewards, advantages and returns.

The policy and the reference go through one executable, so equal parameters give bit-equal log-probabilities.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxppo.config import Config
from jaxppo.models import Model
from jaxppo.models.heads import values
from jaxppo.models.logprobs import token_logprobs
from jaxppo.parallel.mesh import row_sharding
from jaxppo.rl.advantages import token_rewards
from jaxppo.rl.correction import importance_weights
from jaxppo.rl.kl import kl_estimate
from jaxppo.rl.losses import aggregate, explained_variance
from jaxppo.rl.masked import keep, masked_mean, masked_variance, segment_sum
from jaxppo.step.advantages import estimate_advantages
from jaxppo.step.policy import choose_tokens
from jaxppo.step.state import Experience, PackedBatch, Params, TrainState, microbatch

ScoreStep = Callable[[TrainState, Params | None, PackedBatch], Experience]


def make_score_step(config: Config, model: Model, mesh: Mesh, critic_model: Model | None = None) -> ScoreStep:
    """score(state, reference parameters, batch) -> Experience; the reference is None where no KL needs it."""
    critic = model if critic_model is None else critic_model
    temperature = config.rollout.temperature
    draws = config.actor.policy_loss.loss_mode == "clip_cov"

    @jax.jit
    def logprobs_pass(params: Params, batch: PackedBatch) -> tuple[Array, Array]:
        return each_microbatch(lambda micro: token_logprobs(model, params, micro, temperature), batch, mesh)

    @jax.jit
    def values_pass(params: Params, batch: PackedBatch) -> Array:
        return each_microbatch(lambda micro: values(critic, params, micro), batch, mesh)

    @jax.jit
    def experience_pass(
        coef: Array,
        key: Array | None,
        batch: PackedBatch,
        old_logp: Array,
        ref_logp: Array,
        value: Array | None,
        entropy: Array,
    ) -> Experience:
        return make_experience(config, coef, batch, old_logp, ref_logp, value, entropy, key=key)

    def score(state: TrainState, ref_params: Params | None, batch: PackedBatch) -> Experience:
        old_logp, entropy = logprobs_pass(state.actor, batch)
        ref_logp = old_logp if ref_params is None else logprobs_pass(ref_params, batch)[0]
        value = values_pass(state.critic, batch) if config.needs_critic else None
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), 2) if draws else None
        return experience_pass(state.kl.coef, key, batch, old_logp, ref_logp, value, entropy)

    return score


def make_experience(
    config: Config,
    coef: Float[Array, ""],
    batch: PackedBatch,
    old_logp: Float[Array, "M K B T"],
    ref_logp: Float[Array, "M K B T"],
    value: Float[Array, "M K B T"] | None,
    entropy: Float[Array, "M K B T"],
    *,
    key: PRNGKeyArray | None = None,
) -> Experience:
    """Token rewards, advantages and returns of a whole batch.

    reward[t] = score at the last response token - coef * KL[t] where use_kl_in_reward.
    `value` is None without a critic; `key` is for what is drawn at random, and None where nothing is.
    """
    algorithm, mask, segments = config.algorithm, batch.mask, batch.segment_ids
    kl = kl_estimate(old_logp, ref_logp, algorithm.kl_penalty)
    penalty = coef if algorithm.use_kl_in_reward else jnp.zeros_like(coef)
    rewards = token_rewards(batch.scores, kl, penalty, mask, segments)
    penalties = penalty * keep(kl, mask) if algorithm.use_kl_in_reward else jnp.zeros_like(rewards)
    advantages, returns = estimate_advantages(algorithm, batch, rewards, penalties, value)
    experience = Experience(
        batch=batch,
        old_logp=old_logp,
        ref_logp=ref_logp,
        values=value,
        advantages=advantages,
        returns=returns,
        kl=_mean(kl, batch, "seq-mean-token-mean"),
        importance=None,
        chosen=choose_tokens(config.actor.policy_loss, key, old_logp, advantages, mask),
        metrics={},
    )
    metrics = _metrics(config, experience, rewards, entropy)
    if config.needs_reference:
        metrics["actor/reward_kl_penalty"] = experience.kl
    if algorithm.use_kl_in_reward:
        metrics["actor/reward_kl_penalty_coeff"] = coef
    correction = algorithm.rollout_correction
    if correction.rollout_is != "none":
        level, cap = correction.rollout_is, correction.threshold
        weights = importance_weights(old_logp, batch.rollout_logp, mask, segments, level=level, cap=cap)
        metrics |= {f"rollout_corr/rollout_is_{key}": x for key, x in _summary(weights, mask).items()}
        experience = dataclasses.replace(experience, importance=weights)
    return dataclasses.replace(experience, metrics=metrics)


def _metrics(
    config: Config, experience: Experience, rewards: Float[Array, "M K B T"], entropy: Float[Array, "M K B T"]
) -> dict[str, Array]:
    """verl's metrics of a batch before its update."""
    batch = experience.batch
    mask, segments = batch.mask, batch.segment_ids
    probability_gap = jnp.abs(jnp.exp(experience.old_logp) - jnp.exp(batch.rollout_logp))
    logp_gap = jnp.abs(experience.old_logp - batch.rollout_logp)
    summaries = {
        "critic/rewards/": segment_sum(rewards, mask, segments),
        "critic/advantages/": experience.advantages,
        "critic/returns/": experience.returns,
        "training/rollout_probs_diff_": probability_gap,
        "training/rollout_logp_diff_": logp_gap,
    }
    if experience.values is not None:
        summaries["critic/values/"] = experience.values
    metrics = {f"{name}{key}": x for name, y in summaries.items() for key, x in _summary(y, mask).items()}
    metrics["training/rollout_probs_diff_std"] = jnp.sqrt(masked_variance(probability_gap, mask))
    metrics["critic/rewards/mean"] = _mean(rewards, batch, "seq-mean-token-sum")
    if experience.values is not None:
        metrics["critic/vf_explained_var"] = explained_variance(experience.values, experience.returns, mask)
    metrics["actor/entropy"] = _mean(entropy, batch, config.actor.loss_agg_mode, config.data.max_response_length)
    return metrics


def _summary(x: Float[Array, "*batch T"], mask: Bool[Array, "*batch T"]) -> dict[str, Array]:
    return {
        "mean": masked_mean(x, mask),
        "max": jnp.max(x, where=mask, initial=-jnp.inf),
        "min": jnp.min(x, where=mask, initial=jnp.inf),
    }


def _mean(x: Array, batch: PackedBatch, mode: str, norm_length: int = 1) -> Array:
    total, count = aggregate(x, batch.mask, batch.segment_ids, mode, norm_length=norm_length)
    return total / jnp.maximum(count, 1)


def each_microbatch(function: Callable[[PackedBatch], Array | tuple], batch: PackedBatch, mesh: Mesh):
    """The function's arrays [B, T] for every microbatch that holds tokens, stacked to [M, K, B, T]; zeros else.

    The number of microbatches is a traced trip count: fewer rows cost less and never recompile.
    """
    one = jax.eval_shape(lambda: function(microbatch(batch, 0, 0)))
    rows = row_sharding(mesh, 2)
    zeros = jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(jnp.zeros(batch.mask.shape[:2] + x.shape, x.dtype), rows),
        one,
    )

    def minibatch(m: Array, stacked: Array | tuple) -> Array | tuple:
        def body(k: Array, stacked: Array | tuple) -> Array | tuple:
            return jax.tree.map(lambda out, x: out.at[m, k].set(x), stacked, function(microbatch(batch, m, k)))

        return jax.lax.fori_loop(0, batch.num_microbatches[m], body, stacked)

    return jax.lax.fori_loop(0, batch.mask.shape[0], minibatch, zeros)
