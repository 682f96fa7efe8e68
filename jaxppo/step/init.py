"""The first TrainState, and the layout of any."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxppo.config import Config, KLControlConfig
from jaxppo.models import Model, abstract_params, parameter_axes
from jaxppo.models.heads import abstract_value_head, value_head_axes
from jaxppo.parallel.mesh import parameter_shardings, replicated
from jaxppo.rl.kl import AdaptiveKL, FixedKL
from jaxppo.step.optimizer import make_optimizer
from jaxppo.step.state import Params, TrainState


def kl_controller(config: KLControlConfig) -> AdaptiveKL | FixedKL:
    if config.type == "adaptive":
        return AdaptiveKL(config.kl_coef, config.target_kl, config.horizon)
    return FixedKL(config.kl_coef)


def init_state(config: Config, actor: Params, critic: Params | None, key: jax.Array) -> TrainState:
    """Step 0 of a run from given parameters; optimizer moments are zero. Pure: call it under jit to place it.

    Where the config needs no critic there is none, given or not.
    """
    critic = critic if config.needs_critic else None
    return TrainState(
        actor=actor,
        critic=critic,
        actor_opt=make_optimizer(config.actor).init(actor),
        critic_opt=None if critic is None else make_optimizer(config.critic).init(critic),
        kl=kl_controller(config.algorithm.kl_ctrl).init(),
        step=jnp.zeros((), jnp.int32),
        key=key,
    )


def actor_shardings(model: Model, mesh: Mesh) -> Params:
    """The layout of a network without a value head: the actor and the reference."""
    abstract = abstract_params(model.config, jnp.float32)
    return parameter_shardings(mesh, parameter_axes(model.config), abstract)


def critic_shardings(model: Model, mesh: Mesh) -> Params:
    """The layout of a network with a value head."""
    head = parameter_shardings(mesh, value_head_axes(), abstract_value_head(model.config))
    return {**actor_shardings(model, mesh), "value_head": head}


def state_shardings(config: Config, model: Model, critic_model: Model, mesh: Mesh) -> TrainState:
    """A TrainState of NamedShardings: optimizer moments lie as their parameters do, scalars everywhere."""
    actor = actor_shardings(model, mesh)
    critic = critic_shardings(critic_model, mesh) if config.needs_critic else None
    everywhere: Any = replicated(mesh)

    def optimizer_shardings(tx: optax.GradientTransformation, params: Params) -> Any:
        abstract = jax.tree.map(lambda _: jax.ShapeDtypeStruct((), jnp.float32), params)
        state = jax.eval_shape(tx.init, abstract)
        return optax.tree.map_params(tx, lambda _, s: s, state, params, transform_non_params=lambda _: everywhere)

    return TrainState(
        actor=actor,
        critic=critic,
        actor_opt=optimizer_shardings(make_optimizer(config.actor), actor),
        critic_opt=None if critic is None else optimizer_shardings(make_optimizer(config.critic), critic),
        kl=jax.tree.map(lambda _: everywhere, kl_controller(config.algorithm.kl_ctrl).init()),
        step=everywhere,
        key=everywhere,
    )
