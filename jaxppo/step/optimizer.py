"""AdamW with the network's gradients clipped by their global norm; the learning rate follows the PPO step."""

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxppo.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Gradients -> the direction m / (sqrt(v) + eps) + weight_decay * p; the caller steps by -lr along it.

    Source: AdamW (Loshchilov & Hutter 2019), decay on every parameter and eps 1e-8 as in torch.optim.AdamW.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip),
        optax.scale_by_adam(b1=config.betas[0], b2=config.betas[1], eps=1e-8),
        optax.add_decayed_weights(config.weight_decay),
    )


def learning_rate(config: OptimizerConfig, step: Int[Array, ""], total_steps: int) -> Float[Array, ""]:
    """The rate of PPO step `step` (from 0), the same for all its optimizer steps.

    lr * step / lr_warmup_steps first, then lr, or a half cosine down to min_lr_ratio * lr at `total_steps`.
    """
    if config.lr_scheduler == "constant":
        after = optax.constant_schedule(config.lr)
    else:
        decay_steps = max(total_steps - config.lr_warmup_steps, 1)
        after = optax.cosine_decay_schedule(config.lr, decay_steps, alpha=config.min_lr_ratio)
    warmup = optax.linear_schedule(0.0, config.lr, max(config.lr_warmup_steps, 1))
    return jnp.asarray(optax.join_schedules([warmup, after], [config.lr_warmup_steps])(step))
