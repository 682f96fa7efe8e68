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
from jaxppo.rl.kl import kl_estimate
from jaxppo.rl.losses import aggregate, explained_variance
from jaxppo.rl.masked import keep, masked_mean, masked_variance, segment_sum
from jaxppo.step.advantages import estimate_advantages
from jaxppo.step.correction import correct
from jaxppo.step.policy import choose_tokens
from jaxppo.step.state import Experience, PackedBatch, Params, TrainState, microbatch

ScoreStep = Callable[[TrainState, Params | None, PackedBatch], Experience]


def make_score_step(config: Config, model: Model, mesh: Mesh, critic_model: Model | None = None) -> ScoreStep:
    """score(state, reference parameters, batch) -> Experience; the reference is None where no KL needs it."""
    critic = model if critic_model is None else critic_model
    temperature = config.rollout.temperature
    draws = config.actor.policy_loss.loss_mode == "clip_cov"
    needs_energy = config.algorithm.adv_estimator == "optimal_token_baseline"

    @jax.jit
    def logprobs_pass(params: Params, batch: PackedBatch) -> tuple[Array, Array]:
        return each_microbatch(lambda micro: token_logprobs(model, params, micro, temperature), batch, mesh)

    @jax.jit
    def sharp_pass(params: Params, batch: PackedBatch) -> Array:
        return each_microbatch(lambda micro: token_logprobs(model, params, micro, temperature / 2)[0], batch, mesh)

    @jax.jit
    def values_pass(params: Params, batch: PackedBatch) -> Array:
        return each_microbatch(lambda micro: values(critic, params, micro), batch, mesh)

    @jax.jit
    def experience_pass(
        coef: Array,
        key: Array | None,
        batch: PackedBatch,
        old_logp: Array | None,
        ref_logp: Array | None,
        value: Array | None,
        entropy: Array | None,
        sharp: Array | None,
    ) -> Experience:
        passes = (old_logp, ref_logp, value, entropy)
        return make_experience(config, coef, batch, *passes, key=key, sharp_logp=sharp)

    def score(state: TrainState, ref_params: Params | None, batch: PackedBatch) -> Experience:
        old_logp, entropy = logprobs_pass(state.actor, batch) if config.needs_old_logp else (None, None)
        ref_logp = None if ref_params is None else logprobs_pass(ref_params, batch)[0]
        value = values_pass(state.critic, batch) if config.needs_critic else None
        sharp = sharp_pass(state.actor, batch) if needs_energy else None
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), 2) if draws else None
        return experience_pass(state.kl.coef, key, batch, old_logp, ref_logp, value, entropy, sharp)

    return score


def make_experience(
    config: Config,
    coef: Float[Array, ""],
    batch: PackedBatch,
    old_logp: Float[Array, "M K B T"] | None,
    ref_logp: Float[Array, "M K B T"] | None,
    value: Float[Array, "M K B T"] | None,
    entropy: Float[Array, "M K B T"] | None,
    *,
    key: PRNGKeyArray | None = None,
    sharp_logp: Float[Array, "M K B T"] | None = None,
) -> Experience:
    """Token rewards, advantages and returns of a whole batch.

    reward[t] = score at the last response token - coef * KL[t] where use_kl_in_reward.
    What is None was not computed, since nothing needs it; `key` is for what is drawn at random, and `sharp_logp`, the
    policy's at half the temperature, for optimal_token_baseline. What rollout_correction rejects leaves the mask first.
    """
    algorithm, sampled = config.algorithm, batch
    batch, importance, corrected = correct(algorithm.rollout_correction, batch, old_logp)
    mask, segments = batch.mask, batch.segment_ids
    if old_logp is None or ref_logp is None:
        kl = jnp.zeros_like(batch.scores)
    else:
        kl = kl_estimate(old_logp, ref_logp, algorithm.kl_penalty)
    penalty = coef if algorithm.use_kl_in_reward else jnp.zeros_like(coef)
    rewards = token_rewards(batch.scores, kl, penalty, mask, segments)
    penalties = penalty * keep(kl, mask) if algorithm.use_kl_in_reward else jnp.zeros_like(rewards)
    energy = None if sharp_logp is None or old_logp is None else score_energy(old_logp, sharp_logp, importance)
    advantages, returns = estimate_advantages(algorithm, batch, rewards, penalties, value, energy)
    experience = Experience(
        batch=batch,
        old_logp=old_logp,
        ref_logp=ref_logp,
        values=value,
        advantages=advantages,
        returns=returns,
        kl=_mean(kl, batch, "seq-mean-token-mean"),
        importance=importance,
        chosen=choose_tokens(config.actor.policy_loss, key, old_logp, advantages, mask),
        metrics={},
    )
    metrics = _metrics(experience, rewards) | corrected
    if old_logp is not None and entropy is not None:
        metrics |= _policy_metrics(config, sampled, old_logp, entropy)
    if old_logp is not None and ref_logp is not None:
        metrics["actor/reward_kl_penalty"] = experience.kl
    if algorithm.use_kl_in_reward:
        metrics["actor/reward_kl_penalty_coeff"] = coef
    return dataclasses.replace(experience, metrics=metrics)


def _metrics(experience: Experience, rewards: Float[Array, "M K B T"]) -> dict[str, Array]:
    """verl's metrics of rewards, advantages and values."""
    batch = experience.batch
    mask, segments = batch.mask, batch.segment_ids
    summaries = {
        "critic/rewards/": segment_sum(rewards, mask, segments),
        "critic/advantages/": experience.advantages,
        "critic/returns/": experience.returns,
    }
    if experience.values is not None:
        summaries["critic/values/"] = experience.values
    metrics = {f"{name}{key}": x for name, y in summaries.items() for key, x in _summary(y, mask).items()}
    metrics["critic/rewards/mean"] = _mean(rewards, batch, "seq-mean-token-sum")
    if experience.values is not None:
        metrics["critic/vf_explained_var"] = explained_variance(experience.values, experience.returns, mask)
    return metrics


def _policy_metrics(
    config: Config, batch: PackedBatch, logp: Float[Array, "M K B T"], entropy: Float[Array, "M K B T"]
) -> dict[str, Array]:
    """Entropy, and how far the engine's log-probabilities and probabilities are from the trainer's."""
    gaps = {
        "training/rollout_probs_diff_": jnp.abs(jnp.exp(logp) - jnp.exp(batch.rollout_logp)),
        "training/rollout_logp_diff_": jnp.abs(logp - batch.rollout_logp),
    }
    metrics = {f"{name}{key}": x for name, y in gaps.items() for key, x in _summary(y, batch.mask).items()}
    variance = masked_variance(gaps["training/rollout_probs_diff_"], batch.mask)
    metrics["training/rollout_probs_diff_std"] = jnp.sqrt(variance)
    metrics["actor/entropy"] = _mean(entropy, batch, config.actor.loss_agg_mode, config.data.max_response_length)
    return metrics


def score_energy(
    logp: Float[Array, "M K B T"], sharp_logp: Float[Array, "M K B T"], importance: Float[Array, "M K B T"] | None
) -> Float[Array, "M K B T"]:
    """1 - 2 π(token) + Σ π², the squared length of d log π(token) / d logits; times the squared importance weight.

    `sharp_logp` is of half the temperature: with logits z it is 2 z_token - log Σ exp(2 z), so Σ π² is
    exp(2 logp - sharp_logp), and no further pass over the vocabulary is needed.
    """
    energy = 1 - 2 * jnp.exp(logp) + jnp.exp(2 * logp - sharp_logp)
    return energy if importance is None else energy * jnp.square(importance)


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
