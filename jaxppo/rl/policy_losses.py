"""The policy losses beside the clipped one of PPO, in the same form: a loss per token with the metrics' sums.

Throughout r = exp(logp - old_logp), the log-ratio held within ±20, and A is the advantage. The three of whole sequences
(gspo, sapo, geo_mean) are to be aggregated by seq-mean-token-mean. Which tokens clip_cov and kl_cov treat apart is
settled before the update, over a whole minibatch: verl chooses in each microbatch, so that its result depends on the
microbatches' number. Clip fractions are of tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxppo.rl.losses import PolicyLoss
from jaxppo.rl.masked import keep, masked_mean, masked_sum, segment_sum

Tokens = Float[Array, "*batch T"]
Flags = Bool[Array, "*batch T"]


def gspo(
    logp: Tokens,
    old_logp: Tokens,
    advantages: Tokens,
    mask: Flags,
    segment_ids: Int[Array, "*batch T"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s the geometric mean of a sequence's ratios.

    Its gradient reaches a token through that token's own log-probability: s_t = exp(sg(log s) + logp_t - sg(logp_t)),
    with log s at most 10. Zheng et al. 2025, GSPO, equations 5 and 17.
    """
    logp, advantages = keep(logp, mask), keep(advantages, mask)
    log_ratio = _log_ratio(logp, old_logp, mask)
    mean = segment_sum(log_ratio, mask, segment_ids) / _lengths(mask, segment_ids)
    log_s = jnp.minimum(jax.lax.stop_gradient(mean), 10) + logp - jax.lax.stop_gradient(logp)
    return _pessimistic(jnp.exp(log_s), log_ratio, advantages, mask, clip_low, clip_high)


def sapo(
    logp: Tokens, old_logp: Tokens, advantages: Tokens, mask: Flags, *, tau_pos: float, tau_neg: float
) -> PolicyLoss:
    """-A · 4 / τ · sigmoid(τ (r - 1)), a gate in place of the clip; τ = tau_pos where A > 0, else tau_neg.

    At r = 1 its gradient is the policy gradient's. Gao et al. 2025, SAPO.
    """
    advantages = keep(advantages, mask)
    log_ratio = _log_ratio(logp, old_logp, mask)
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    loss = -advantages * jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1)) * 4 / tau
    return _result(loss, log_ratio, mask)


def geo_mean(
    logp: Tokens,
    old_logp: Tokens,
    advantages: Tokens,
    mask: Flags,
    segment_ids: Int[Array, "*batch T"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-mean(A) · exp(mean(c)) for each sequence, at each of its tokens; Zhao et al. 2025, GMPO, equation 4.

        c = sgn(A) · min(sgn(A) log r, sgn(A) clip(log r, -clip_low, clip_high))

    The bounds are of log-ratios here. Every token has its share of the gradient, so that the mean over a sequence's
    tokens has the value and the gradient of the sequence's own loss.
    """
    advantages = keep(advantages, mask)
    log_ratio, sign = _log_ratio(logp, old_logp, mask), jnp.sign(advantages)
    bounded = jnp.clip(log_ratio, -clip_low, clip_high)
    is_clipped = sign * bounded < sign * log_ratio
    clipped = jnp.where(sign == 0, 0, jnp.where(is_clipped, bounded, log_ratio))
    lengths = _lengths(mask, segment_ids)
    fixed = jax.lax.stop_gradient(clipped)
    ratio = jnp.exp(segment_sum(fixed, mask, segment_ids) / lengths)
    mean_advantage = segment_sum(advantages, mask, segment_ids) / lengths
    loss = -mean_advantage * ratio * (1 + clipped - fixed)
    return _result(loss, log_ratio, mask, is_clipped & (advantages > 0), is_clipped & (advantages < 0))


def cispo(
    logp: Tokens, old_logp: Tokens, advantages: Tokens, mask: Flags, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) · A · logp: the weight is clipped, and no token loses its gradient.

    MiniMax 2025, MiniMax-M1, equation 4.
    """
    logp, advantages = keep(logp, mask), keep(advantages, mask)
    log_ratio = _log_ratio(logp, old_logp, mask)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return _result(-weight * advantages * logp, log_ratio, mask, weight != ratio)


def gpg(logp: Tokens, old_logp: Tokens, advantages: Tokens, mask: Flags) -> PolicyLoss:
    """-A · logp, the plain policy gradient. Chu et al. 2025, GPG. `old_logp` is for the metric alone."""
    loss = -keep(advantages, mask) * keep(logp, mask)
    return _result(loss, _log_ratio(logp, old_logp, mask), mask)


def clip_cov(
    logp: Tokens,
    old_logp: Tokens,
    advantages: Tokens,
    mask: Flags,
    chosen: Flags,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and 0 at the `chosen` tokens (`choose_clip_cov`).

    pg_clipfrac counts those alone, as verl's does. Cui et al. 2025, The Entropy Mechanism, equation 9.
    """
    advantages = keep(advantages, mask)
    log_ratio = _log_ratio(logp, old_logp, mask)
    loss = _pessimistic(jnp.exp(log_ratio), log_ratio, advantages, mask, clip_low, clip_high).loss
    return _result(jnp.where(chosen, 0, loss), log_ratio, mask, chosen)


def kl_cov(
    logp: Tokens, old_logp: Tokens, advantages: Tokens, mask: Flags, chosen: Flags, *, kl_coef: float
) -> PolicyLoss:
    """-A r, plus kl_coef · |log r| at the `chosen` tokens (`choose_kl_cov`). Cui et al. 2025, equation 11.

    ppo_kl is Σ |log r|, as verl's is.
    """
    advantages = keep(advantages, mask)
    log_ratio = _log_ratio(logp, old_logp, mask)
    loss = -advantages * jnp.exp(log_ratio) + jnp.where(chosen, kl_coef * jnp.abs(log_ratio), 0)
    return dataclasses.replace(_result(loss, log_ratio, mask), ppo_kl=masked_sum(jnp.abs(log_ratio), mask))


def covariance(logp: Tokens, advantages: Tokens, mask: Flags) -> Tokens:
    """(A - mean A) (logp - mean logp) over the mask, 0 outside: what a token adds to the entropy's change."""
    a, b = (x - masked_mean(x, mask) for x in (keep(advantages, mask), keep(logp, mask)))
    return keep(a * b, mask)


def choose_clip_cov(key: PRNGKeyArray, cov: Tokens, mask: Flags, *, ratio: float, lower: float, upper: float) -> Flags:
    """max(1, ⌊ratio · tokens⌋) at random among those with lower < cov < upper, or all of those if they are fewer."""
    candidates = mask & (cov > lower) & (cov < upper)
    return _greatest(jax.random.uniform(key, cov.shape), candidates, mask, ratio)


def choose_kl_cov(cov: Tokens, mask: Flags, *, ratio: float) -> Flags:
    """The max(1, ⌊ratio · tokens⌋) tokens of greatest covariance; of equals those that come first."""
    return _greatest(cov, mask, mask, ratio)


def _greatest(x: Tokens, candidates: Flags, mask: Flags, ratio: float) -> Flags:
    count = jnp.maximum(jnp.floor(ratio * mask.sum()), 1)
    order = jnp.argsort(jnp.where(candidates, -x, jnp.inf).ravel())
    rank = jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.arange(order.size), unique_indices=True)
    return candidates & (rank.reshape(x.shape) < count)


def _log_ratio(logp: Tokens, old_logp: Tokens, mask: Flags) -> Tokens:
    return jnp.clip(keep(logp, mask) - keep(old_logp, mask), -20, 20)


def _lengths(mask: Flags, segment_ids: Int[Array, "*batch T"]) -> Tokens:
    """Tokens of the mask in each one's sequence, at least 1."""
    return jnp.maximum(segment_sum(jnp.ones(mask.shape), mask, segment_ids), 1)


def _pessimistic(
    ratio: Tokens, log_ratio: Tokens, advantages: Tokens, mask: Flags, clip_low: float, clip_high: float
) -> PolicyLoss:
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    is_clipped = clipped > plain
    return _result(jnp.where(is_clipped, clipped, plain), log_ratio, mask, is_clipped)


def _result(
    loss: Tokens,
    log_ratio: Tokens,
    mask: Flags,
    is_clipped: Flags | bool = False,
    is_clipped_below: Flags | bool = False,
) -> PolicyLoss:
    def count(flags: Flags | bool) -> Float[Array, ""]:
        return (mask & flags).sum().astype(loss.dtype)

    return PolicyLoss(
        loss=keep(loss, mask),
        pg_clipfrac=count(is_clipped),
        pg_clipfrac_lower=count(is_clipped_below),
        ppo_kl=masked_sum(-log_ratio, mask),
        count=count(True),
    )
