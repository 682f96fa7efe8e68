"""The PPO update: one compiled program from (state, experience) to (next state, metrics).

Read it from the top: critic first, then actor, each for ppo_epochs over the minibatches; a minibatch's gradient
is the sum over its microbatches of gradients of summed losses, divided once by the minibatch's count. So neither
the number of microbatches nor of devices can change it beyond rounding. Last, the KL controller moves.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxppo.config import Config
from jaxppo.models import Model
from jaxppo.models.heads import values
from jaxppo.models.logprobs import token_logprobs
from jaxppo.parallel.mesh import replicated
from jaxppo.rl.kl import kl_estimate
from jaxppo.rl.losses import aggregate, value_loss
from jaxppo.rl.masked import masked_sum
from jaxppo.step.init import kl_controller, state_shardings
from jaxppo.step.optimizer import learning_rate, make_optimizer
from jaxppo.step.policy import token_policy_loss
from jaxppo.step.state import Experience, Params, TrainState, microbatch

Metrics = dict[str, Array]
UpdateStep = Callable[[TrainState, Experience], tuple[TrainState, Metrics]]
Means = dict[str, tuple[Array, Array]]
"""Metrics as (sum, count), which add over microbatches."""
Loss = Callable[[Params, Experience], tuple[Array, tuple[Array, Means]]]
"""(parameters, one microbatch [B, T]) -> the summed loss, (its count, metrics)."""


def make_update_step(config: Config, model: Model, mesh: Mesh, critic_model: Model | None = None) -> UpdateStep:
    """update(state, experience) -> (state, metrics), compiled once; the given state is donated (dead after it).

    Metrics are float32 scalars, means over the step's optimizer steps, beside the experience's own.
    """
    critic_model = model if critic_model is None else critic_model
    actor_loss, critic_loss = make_actor_loss(config, model), make_critic_loss(config, critic_model)
    actor_tx, critic_tx = make_optimizer(config.actor), make_optimizer(config.critic)
    controller = kl_controller(config.algorithm.kl_ctrl)
    total_steps = config.trainer.total_training_steps or 0
    epochs = config.actor.ppo_epochs
    norm_max = config.guards.grad_norm_max if config.guards.grad_norm == "skip" else None

    def update(state: TrainState, experience: Experience) -> tuple[TrainState, Metrics]:
        critic, critic_opt, critic_metrics = state.critic, state.critic_opt, {}
        if config.needs_critic:
            critic_lr = learning_rate(config.critic, state.step, total_steps)
            critic, critic_opt, critic_metrics = optimize(
                critic_loss, critic_tx, critic_lr, epochs, critic, critic_opt, experience, norm_max
            )
        warming_up = state.step < config.trainer.critic_warmup
        actor_lr = jnp.where(warming_up, 0.0, learning_rate(config.actor, state.step, total_steps))
        actor_epochs = jnp.where(warming_up, 0, epochs)
        actor, actor_opt, actor_metrics = optimize(
            actor_loss, actor_tx, actor_lr, actor_epochs, state.actor, state.actor_opt, experience, norm_max
        )
        next_state = dataclasses.replace(
            state,
            actor=actor,
            critic=critic,
            actor_opt=actor_opt,
            critic_opt=critic_opt,
            # without any token there is no KL that the controller could act on
            kl=controller.update(
                state.kl, jnp.where(experience.batch.mask.any(), experience.kl, jnp.nan), experience.batch.num_sequences
            ),
            step=state.step + 1,
        )
        metrics = {f"critic/{name}": x for name, x in critic_metrics.items()}
        metrics |= {f"{'training' if 'rollout' in name else 'actor'}/{name}": x for name, x in actor_metrics.items()}
        if config.actor.use_kl_loss:
            metrics["actor/kl_coef"] = jnp.float32(config.actor.kl_loss_coef)
        return next_state, experience.metrics | metrics

    out_shardings = (state_shardings(config, model, critic_model, mesh), replicated(mesh))
    return jax.jit(update, donate_argnums=0, out_shardings=out_shardings)


def make_actor_loss(config: Config, model: Model) -> Loss:
    """The policy loss, minus the entropy bonus, plus the KL loss: aggregated to (sum, count)."""
    actor, norm_length = config.actor, config.data.max_response_length

    def loss(params: Params, micro: Experience) -> tuple[Array, tuple[Array, Means]]:
        batch = micro.batch
        logp, entropy = token_logprobs(model, params, batch, config.rollout.temperature)
        # verl's shortcut: on policy, the ratio is 1 whatever was scored
        old_logp = jax.lax.stop_gradient(logp) if config.on_policy or micro.old_logp is None else micro.old_logp
        policy = token_policy_loss(actor, logp, old_logp, micro)
        weighted = policy.loss if micro.importance is None else policy.loss * micro.importance
        terms = {"pg_loss": (1.0, weighted)}
        if actor.entropy_coeff != 0:
            terms["entropy_loss"] = (-actor.entropy_coeff, entropy)
        if actor.use_kl_loss and micro.ref_logp is not None:
            terms["kl_loss"] = (actor.kl_loss_coef, kl_estimate(logp, micro.ref_logp, actor.kl_loss_type))
        sums = {
            name: aggregate(x, batch.mask, batch.segment_ids, actor.loss_agg_mode, norm_length=norm_length)
            for name, (_, x) in terms.items()
        }
        total = sum((coef * sums[name][0] for name, (coef, _) in terms.items()), jnp.zeros(()))
        means = sums | {
            "pg_clipfrac": (policy.pg_clipfrac, policy.count),
            "pg_clipfrac_lower": (policy.pg_clipfrac_lower, policy.count),
            "ppo_kl": (policy.ppo_kl, policy.count),
        }
        if not config.needs_old_logp:  # what scoring tells otherwise
            means["entropy"] = aggregate(
                entropy, batch.mask, batch.segment_ids, actor.loss_agg_mode, norm_length=norm_length
            )
            for name, gap in {
                "logp": jnp.abs(logp - batch.rollout_logp),
                "probs": jnp.abs(jnp.exp(logp) - jnp.exp(batch.rollout_logp)),
            }.items():
                means[f"rollout_{name}_diff_mean"] = (masked_sum(gap, batch.mask), policy.count)
        return total, (sums["pg_loss"][1], means)

    return loss


def make_critic_loss(config: Config, model: Model) -> Loss:
    """The clipped value loss, aggregated as the policy's is."""
    mode, norm_length = config.actor.loss_agg_mode, config.data.max_response_length

    def loss(params: Params, micro: Experience) -> tuple[Array, tuple[Array, Means]]:
        batch = micro.batch
        assert micro.values is not None  # they were scored for the critic
        value = value_loss(
            values(model, params, batch),
            micro.values,
            micro.returns,
            batch.mask,
            clip=config.critic.cliprange_value,
        )
        total, count = aggregate(value.loss, batch.mask, batch.segment_ids, mode, norm_length=norm_length)
        means = {
            "vf_loss": (total, count),
            "vf_clipfrac": (value.vf_clipfrac, value.count),
            "vpred_mean": (value.vpred, value.count),
        }
        return total, (count, means)

    return loss


def optimize(
    loss: Loss,
    tx: optax.GradientTransformation,
    lr: Float[Array, ""],
    epochs: int | Int[Array, ""],
    params: Params,
    opt_state: Any,
    experience: Experience,
    grad_norm_max: float | None = None,
) -> tuple[Params, Any, Metrics]:
    """One optimizer step p <- p - lr * direction for each minibatch of each epoch, in their order.

    A step whose gradient is not finite, or whose norm is above `grad_norm_max`, changes nothing and is counted in
    `skipped_updates`; the other metrics are means over the steps that were taken, and NaN where every one was skipped.
    A minibatch without any token in the loss changes nothing either, not even a moment, and counts nowhere.
    """
    minibatches = experience.batch.mask.shape[0]

    def minibatch_step(i: Array, carry: tuple[Params, Any, dict]) -> tuple[Params, Any, dict]:
        params, opt_state, totals = carry
        grads, means = gradient(loss, params, experience, i % minibatches)
        grad_norm = optax.tree.norm(grads)
        empty = ~experience.batch.mask[i % minibatches].any()
        finite = jnp.isfinite(grad_norm) if grad_norm_max is None else grad_norm <= grad_norm_max
        taken = finite & ~empty
        direction, next_opt_state = tx.update(grads, opt_state, params)
        next_params = jax.tree.map(lambda p, d: (p - lr * d).astype(p.dtype), params, direction)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(taken, new, old), (next_params, next_opt_state), (params, opt_state)
        )
        metrics = {name: jnp.where(taken, x, 0.0) for name, x in (means | {"grad_norm": grad_norm}).items()}
        metrics |= {"skipped_updates": jnp.float32(~finite & ~empty), "empty": jnp.float32(empty)}
        totals = {name: total + metrics[name] for name, total in totals.items()}
        return params, opt_state, totals

    names = jax.eval_shape(lambda: gradient(loss, params, experience, jnp.int32(0))[1])
    totals = {name: jnp.zeros(()) for name in [*names, "grad_norm", "skipped_updates", "empty"]}
    steps = epochs * minibatches
    params, opt_state, totals = jax.lax.fori_loop(0, steps, minibatch_step, (params, opt_state, totals))
    skipped, offered = totals.pop("skipped_updates"), steps - totals.pop("empty")
    share = jnp.where(skipped == 0, 1.0, offered / (offered - skipped))
    metrics = {name: total / jnp.maximum(offered, 1) * share for name, total in totals.items()}
    return params, opt_state, metrics | {"skipped_updates": skipped, "lr": lr}


def gradient(loss: Loss, params: Params, experience: Experience, m: int | Int[Array, ""]) -> tuple[Params, Metrics]:
    """d(sum of losses)/dp over the minibatch's microbatches, divided by the minibatch's count; means of metrics.

    Sums are float32 at least, whatever the parameters are.
    """
    gradient_and_aux = jax.grad(loss, has_aux=True)

    def add_microbatch(k: Array, sums: Any) -> Any:
        return jax.tree.map(jnp.add, sums, gradient_and_aux(params, microbatch(experience, m, k)))

    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)),
        jax.eval_shape(lambda: gradient_and_aux(params, microbatch(experience, m, 0))),
    )
    trips = experience.batch.num_microbatches[m]
    sums, (count, means) = jax.lax.fori_loop(0, trips, add_microbatch, zeros)
    grads = jax.tree.map(lambda g, p: (g / jnp.maximum(count, 1)).astype(p.dtype), sums, params)
    return grads, {name: total / jnp.maximum(n, 1) for name, (total, n) in means.items()}
