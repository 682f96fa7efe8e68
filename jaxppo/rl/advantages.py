"""Rewards per token, and every estimator of advantages: GAE, returns to go, and those of a whole response's score.

Token estimators work on packed rows [*batch, T]. Outcome estimators take scores [N] with group ids [N] (one prompt's
responses share one; below 0 is no response at all) and return [N]. A group of one has no mean to be compared with:
as in verl, its baseline is 0.
"""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxppo.rl.groups import group_mean, group_size, group_std, group_sum, lead_over_group, pair_ids
from jaxppo.rl.masked import full_precision, keep, whiten
from jaxppo.rl.segments import backward_recurrence, continues, last_tokens


def token_rewards(
    scores: Float[Array, "*batch T"],
    kl: Float[Array, "*batch T"],
    coef: ArrayLike,
    mask: Bool[Array, "*batch T"],
    segment_ids: Int[Array, "*batch T"],
) -> Float[Array, "*batch T"]:
    """r_t = [t is the last masked-in token of its segment] · score - coef · kl_t inside the mask, 0 outside.

    `scores` holds each segment's score at all of its tokens. A segment without masked-in tokens has none.
    """
    score = keep(scores, last_tokens(mask, segment_ids))
    return jnp.where(mask, score - coef * keep(kl, mask), 0)


def gae(
    rewards: Float[Array, "*batch T"],
    values: Float[Array, "*batch T"],
    mask: Bool[Array, "*batch T"],
    segment_ids: Int[Array, "*batch T"],
    *,
    gamma: ArrayLike,
    lam: ArrayLike,
) -> tuple[Float[Array, "*batch T"], Float[Array, "*batch T"]]:
    """Advantages (raw, not whitened) and returns; both 0 outside the mask. Schulman et al. 2016, equation 16.

        δ_t = r_t + γ V_next(t) - V_t        A_t = δ_t + γ λ A_next(t)        R_t = A_t + V_t

    next(t) is the next masked-in token of the same segment: what lies between (a tool's tokens, say) is
    skipped without any discount. After a segment's last one V and A are 0: nothing is bootstrapped past the
    end.
    """
    rewards, values = keep(rewards, mask), keep(values, mask)
    inside = continues(segment_ids)
    # The value that the token before sees: one's own, or outside the mask the one that is passed on.
    seen = backward_recurrence((inside & ~mask).astype(values.dtype), values)
    next_values = jnp.where(inside, jnp.roll(seen, -1, axis=-1), 0)
    deltas = keep(rewards + gamma * next_values - values, mask)
    decay = jnp.where(inside, jnp.where(mask, gamma * lam, 1), 0).astype(values.dtype)
    advantages = keep(backward_recurrence(decay, deltas), mask)
    return advantages, keep(advantages + values, mask)


def rewards_to_go(
    rewards: Float[Array, "*batch T"],
    mask: Bool[Array, "*batch T"],
    segment_ids: Int[Array, "*batch T"],
    *,
    gamma: ArrayLike,
) -> Float[Array, "*batch T"]:
    """G_t = r_t + γ G_next(t) over the masked-in tokens of a segment, 0 outside the mask."""
    return gae(rewards, jnp.zeros_like(rewards), mask, segment_ids, gamma=gamma, lam=1.0)[1]


def reinforce_plus_plus(
    rewards: Float[Array, "*batch T"],
    mask: Bool[Array, "*batch T"],
    segment_ids: Int[Array, "*batch T"],
    *,
    gamma: ArrayLike,
) -> tuple[Float[Array, "*batch T"], Float[Array, "*batch T"]]:
    """Advantages: the returns, whitened over all tokens; returns: rewards to go. Hu et al. 2025, REINFORCE++.

    verl's returns start anew after a tool's tokens, so that no reward reaches what was said before; these skip them.
    """
    returns = rewards_to_go(rewards, mask, segment_ids, gamma=gamma)
    return whiten(returns, mask), returns


def remax(
    rewards: Float[Array, "*batch T"],
    baselines: Float[Array, "*batch T"],
    mask: Bool[Array, "*batch T"],
    segment_ids: Int[Array, "*batch T"],
) -> tuple[Float[Array, "*batch T"], Float[Array, "*batch T"]]:
    """A_t = G_t - b and G_t, the undiscounted rewards to go; b is the score of the prompt's greedy response.

    Source: Li et al. 2023, ReMax, algorithm 2. (verl's baseline response is sampled: its greedy flag is not read.)
    """
    returns = rewards_to_go(rewards, mask, segment_ids, gamma=1.0)
    return keep(returns - baselines, mask), returns


def optimal_token_baseline(
    rewards: Float[Array, "*batch T"],
    energy: Float[Array, "*batch T"],
    mask: Bool[Array, "*batch T"],
    segment_ids: Int[Array, "*batch T"],
    group_ids: Int[Array, "*batch T"],
) -> tuple[Float[Array, "*batch T"], Float[Array, "*batch T"]]:
    """A = G - B and G, the undiscounted rewards to go, for the i-th sequence of a group at its t-th token:

        W_it = Σ_{s ≤ t} energy_is        B_t = Σ_i G_it W_it / (Σ_i W_it + 1e-8)

    over the sequences of the group that have a t-th token in the mask: the baseline of least variance, with the
    squared length of the score function for a weight. `energy` stands for that of one token: 1 - 2 π(token) + Σ π².
    Where a group has one sequence B is 0; where only one of several is that long its advantage is 0.
    Source: the optimal token baseline of verl's documents (which at its head raises a TypeError), in the form that
    counts a sequence's own tokens only.
    """
    returns = rewards_to_go(rewards, mask, segment_ids, gamma=1.0)
    weight = _sum_so_far(keep(energy, mask), mask, segment_ids)
    index = _sum_so_far(mask.astype(weight.dtype), mask, segment_ids).astype(jnp.int32)
    groups = jnp.where(mask, group_ids, -1).ravel()
    places = pair_ids(groups, index.ravel())
    weighted, total = group_sum((returns * weight).ravel(), places), group_sum(weight.ravel(), places)
    alone = group_sum(last_tokens(mask, segment_ids).astype(weight.dtype).ravel(), groups) < 2
    baselines = jnp.where(alone, 0, weighted / (total + 1e-8)).reshape(mask.shape)
    return keep(returns - baselines, mask), returns


def grpo(scores: Float[Array, " N"], group_ids: Int[Array, " N"], *, norm_by_std: bool = True) -> Float[Array, " N"]:
    """A = (R - mean) / (std + 1e-6) over the group. Shao et al. 2024, DeepSeekMath, section 4.1.2.

    Without norm_by_std A = R - mean: Dr.GRPO (Liu et al. 2025). A group of one has mean 0 and std 1.
    """
    centred = _minus_mean(scores, group_ids)
    if not norm_by_std:
        return centred
    std = jnp.where(group_size(group_ids) < 2, 1, group_std(scores, group_ids))
    return centred / (std + 1e-6)


def rloo(scores: Float[Array, " N"], group_ids: Int[Array, " N"]) -> Float[Array, " N"]:
    """A = R - the mean of the group's others = n / (n - 1) · (R - mean). Ahmadian et al. 2024, section 3.3."""
    n = group_size(group_ids)
    return _minus_mean(scores, group_ids) * jnp.where(n < 2, 1, n / jnp.maximum(n - 1, 1))


def reinforce_plus_plus_baseline(scores: Float[Array, " N"], group_ids: Int[Array, " N"]) -> Float[Array, " N"]:
    """R - mean of the group; whitened over all tokens of the batch it is the advantage. Hu et al. 2025."""
    return _minus_mean(scores, group_ids)


def opo(scores: Float[Array, " N"], group_ids: Int[Array, " N"], lengths: Float[Array, " N"]) -> Float[Array, " N"]:
    """A = R - Σ len · R / Σ len over the group; lengths in tokens. Hao et al. 2025, OPO."""
    weight = jnp.where(group_size(group_ids) < 2, 0, full_precision(lengths))
    # around the mean, so that equal scores give exactly 0; a weighted mean does not see the shift
    mean = group_mean(scores, group_ids)
    total = group_sum(weight, group_ids)
    shift = group_sum(weight * (scores - mean), group_ids) / jnp.where(total > 0, total, 1)
    return jnp.where(group_ids < 0, 0, jnp.where(total > 0, scores - mean - shift, scores))


def gpg(scores: Float[Array, " N"], group_ids: Int[Array, " N"]) -> Float[Array, " N"]:
    """A = α (R - mean), α = responses / max(1, those whose score is not 0), over the batch. Chu et al. 2025, GPG.

    α as in verl; the paper counts the responses of groups whose scores differ.
    """
    present = group_ids >= 0
    alpha = present.sum() / jnp.maximum((present & (scores != 0)).sum(), 1)
    return alpha * _minus_mean(scores, group_ids)


def grpo_passk(
    scores: Float[Array, " N"], group_ids: Int[Array, " N"], *, norm_by_std: bool = True
) -> Float[Array, " N"]:
    """The group's best response gets its lead over the second, / (std + 1e-6) with norm_by_std; all others get 0.

    So do equals at the top, and a group of one (verl raises). Source: verl, after Chen et al. 2025, Pass@k Training.
    """
    lead = lead_over_group(scores, group_ids)
    return lead / (group_std(scores, group_ids) + 1e-6) if norm_by_std else lead


def _minus_mean(scores: Float[Array, " N"], group_ids: Int[Array, " N"]) -> Float[Array, " N"]:
    """R - mean of the group, R itself in a group of one, 0 for an id below 0."""
    mean = jnp.where(group_size(group_ids) < 2, 0, group_mean(scores, group_ids))
    return jnp.where(group_ids < 0, 0, full_precision(scores) - mean)


def _sum_so_far(
    x: Float[Array, "*batch T"], mask: Bool[Array, "*batch T"], segment_ids: Int[Array, "*batch T"]
) -> Float[Array, "*batch T"]:
    """Σ x over the masked-in tokens of t's segment up to t itself."""
    x, inside = jnp.flip(keep(x, mask), -1), continues(jnp.flip(segment_ids, -1))
    return jnp.flip(backward_recurrence(inside.astype(x.dtype), x), -1)
