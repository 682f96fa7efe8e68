"""The networks of a run: their functions on the mesh, and the first or the abstract state of them."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxppo.config import Config, ConfigError
from jaxppo.models import Architecture, Model, init_params, load
from jaxppo.models.heads import init_value_head
from jaxppo.models.huggingface import MODEL_FILES, load_params, resolve_folder
from jaxppo.parallel.collectives import collectives
from jaxppo.parallel.fits import check_fits
from jaxppo.parallel.mesh import constrain_fn, num_row_shards
from jaxppo.parallel.offload import to_host
from jaxppo.step.init import actor_shardings, init_state, state_shardings
from jaxppo.step.state import Params, TrainState


@dataclasses.dataclass(frozen=True)
class Networks:
    """Actor and critic without parameters, and the folders of those that they start from."""

    mesh: Mesh
    actor: Model
    critic: Model
    folder: Path
    critic_folder: Path


def make_networks(config: Config, mesh: Mesh, patterns: Sequence[str] = MODEL_FILES) -> Networks:
    """Raises ConfigError where they do not go with each other, with the mesh, or with the lengths of sequences.

    `patterns` are the files that are needed of a hub's folder.
    """
    folder = resolve_folder(config.model.path, patterns=patterns)
    actor = _model(config, folder, mesh)
    critic_folder = folder
    if config.critic.path is not None:
        critic_folder = resolve_folder(config.critic.path, "critic.path", patterns)
    critic = _model(config, critic_folder, mesh)
    if critic.config.vocab_size != actor.config.vocab_size:
        raise ConfigError(
            f"critic.path = {config.critic.path}: its vocabulary of {critic.config.vocab_size} is not the "
            f"actor's {actor.config.vocab_size}: both read the same token ids"
        )
    check_fits(mesh, actor.config, "model.path", config.row_length)
    check_fits(mesh, critic.config, "critic.path", config.row_length)
    return Networks(mesh, actor, critic, folder, critic_folder)


def first_state(config: Config, networks: Networks) -> TrainState:
    """Of a new run: parameters from their folders, or random."""
    shardings = state_shardings(config, networks.actor, networks.critic, networks.mesh)
    actor = jax.device_put(_first_params(config, networks.actor, networks.folder, 0), shardings.actor)
    critic = None
    if config.needs_critic:
        params = _first_params(config, networks.critic, networks.critic_folder, 1, critic=True)
        critic = jax.device_put(params, shardings.critic)
    init = jax.jit(partial(init_state, config), out_shardings=shardings, donate_argnums=(0, 1))
    return init(actor, critic, jax.random.key(config.trainer.seed))


def reference_params(config: Config, networks: Networks) -> Params | None:
    """What the actor started from; None where no KL needs it."""
    if not config.needs_reference:
        return None
    params = _first_params(config, networks.actor, networks.folder, 0)
    params = jax.device_put(params, actor_shardings(networks.actor, networks.mesh))
    return to_host(params) if "reference" in config.rollout.offload else params


def abstract_state(config: Config, networks: Networks) -> TrainState:
    """Shapes and layouts of a TrainState, nothing allocated."""
    actor, critic = networks.actor, networks.critic
    shardings = state_shardings(config, actor, critic, networks.mesh)

    def init() -> TrainState:
        key = jax.random.key(config.trainer.seed)
        actor_params = init_params(actor.config, key, actor.param_dtype)
        critic_params = init_params(critic.config, key, critic.param_dtype)
        return init_state(config, actor_params, {**critic_params, "value_head": init_value_head(critic.config)}, key)

    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(init), shardings
    )


def _model(config: Config, folder: Path, mesh: Mesh) -> Model:
    architecture = Architecture.from_folder(folder)
    check_positions(config, architecture, str(folder))
    return load(
        architecture,
        dtype=config.model.dtype,
        param_dtype=config.model.param_dtype,
        remat=config.model.remat,
        layers=config.model.layers,
        attention=config.model.attention,
        constrain=constrain_fn(mesh),
        row_shards=num_row_shards(mesh),
        mesh=collectives(mesh),
    )


def check_positions(config: Config, architecture: Architecture, folder: str) -> None:
    """Raises ConfigError where a sequence can be longer than the network has positions for."""
    limit, data = architecture.max_positions, config.data
    if limit is not None and config.max_sequence_length > limit:
        raise ConfigError(
            f"data.max_prompt_length = {data.max_prompt_length} and data.max_response_length = "
            f"{data.max_response_length}: together at most the {limit} positions of {folder} (max_position_embeddings "
            "of its config.json, rope scaling counted)"
        )


def _first_params(config: Config, model: Model, folder: Path, salt: int, *, critic: bool = False) -> Params:
    """The parameters that training starts from; `salt` tells random networks apart."""
    if config.model.init == "pretrained":
        return load_params(folder, model.config, model.param_dtype, critic=critic)
    key = jax.random.fold_in(jax.random.key(config.trainer.seed), salt)
    params = init_params(model.config, key, model.param_dtype)
    return {**params, "value_head": init_value_head(model.config)} if critic else params
