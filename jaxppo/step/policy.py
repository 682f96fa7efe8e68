"""The policy loss that the config names, and the tokens that it treats apart."""

import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxppo.config import ActorConfig, PolicyLossConfig
from jaxppo.rl import policy_losses
from jaxppo.rl.losses import PolicyLoss, policy_loss
from jaxppo.step.state import Experience


def token_policy_loss(
    actor: ActorConfig, logp: Float[Array, "B T"], old_logp: Float[Array, "B T"], micro: Experience
) -> PolicyLoss:
    """Per token of one microbatch, before importance weights and aggregation."""
    advantages, mask, segments = micro.advantages, micro.batch.mask, micro.batch.segment_ids
    given = (logp, old_logp, advantages, mask)
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    match actor.policy_loss.loss_mode:
        case "vanilla":
            return policy_loss(*given, clip_low=low, clip_high=high, clip_c=actor.clip_ratio_c)
        case "gspo":
            return policy_losses.gspo(*given, segments, clip_low=low, clip_high=high)
        case "sapo":
            return policy_losses.sapo(*given, tau_pos=actor.tau_pos, tau_neg=actor.tau_neg)
        case "geo_mean":
            return policy_losses.geo_mean(*given, segments, clip_low=low, clip_high=high)
        case "cispo":
            return policy_losses.cispo(*given, clip_low=low, clip_high=high)
        case "gpg":
            return policy_losses.gpg(*given)
        case "clip_cov":
            assert micro.chosen is not None
            return policy_losses.clip_cov(*given, micro.chosen, clip_low=low, clip_high=high)
        case "kl_cov":
            assert micro.chosen is not None
            return policy_losses.kl_cov(*given, micro.chosen, kl_coef=actor.policy_loss.ppo_kl_coef)


def choose_tokens(
    config: PolicyLossConfig,
    key: PRNGKeyArray | None,
    logp: Float[Array, "M K B T"] | None,
    advantages: Float[Array, "M K B T"],
    mask: Bool[Array, "M K B T"],
) -> Bool[Array, "M K B T"] | None:
    """Of each minibatch, by the covariance of its advantages with the log-probabilities that the update starts from."""

    def of_minibatch(key: PRNGKeyArray | None, logp: Array, advantages: Array, mask: Array) -> Array:
        cov = policy_losses.covariance(logp, advantages, mask)
        if key is None:
            return policy_losses.choose_kl_cov(cov, mask, ratio=config.kl_cov_ratio)
        bounds = {"lower": config.clip_cov_lb, "upper": config.clip_cov_ub}
        return policy_losses.choose_clip_cov(key, cov, mask, ratio=config.clip_cov_ratio, **bounds)

    match config.loss_mode:
        case "clip_cov":
            assert key is not None
            assert logp is not None
            return jax.vmap(of_minibatch)(jax.random.split(key, len(mask)), logp, advantages, mask)
        case "kl_cov":
            assert logp is not None
            return jax.vmap(of_minibatch, in_axes=(None, 0, 0, 0))(None, logp, advantages, mask)
    return None
