"""The real score and update steps of a config, traced and compiled for its mesh from shapes: nothing is allocated."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxppo.config import Config, MeshConfig
from jaxppo.models import Model
from jaxppo.parallel.mesh import make_mesh, replicated, row_sharding
from jaxppo.planning.attention import blockwise_attention
from jaxppo.run.networks import abstract_state, make_networks
from jaxppo.run.programs import rows_per_microbatch
from jaxppo.step.packing import rows_bound
from jaxppo.step.score import make_score_step
from jaxppo.step.state import PackedBatch, Params, TrainState
from jaxppo.step.update import make_update_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A step function with its abstract arguments: trees of jax.ShapeDtypeStruct with shardings."""

    jaxpr: Any
    compile: Callable[[], Any]
    arguments: tuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """Both steps of a config on its mesh."""

    config: Config
    mesh: Mesh
    actor: Model
    critic: Model
    state: TrainState
    reference: Params | None
    batch: PackedBatch
    rows: int
    """Rows of a microbatch, over all devices."""
    score: Program
    update: Program


def trace(config: Config) -> Traced:
    """Raises UserError and ConfigError where a run would, before anything is compiled."""
    mesh = make_mesh(config.mesh)
    config = on_a_gpu(config, mesh)
    networks = make_networks(config, mesh, patterns=("config.json",))
    actor, critic = (for_plan(config, model) for model in (networks.actor, networks.critic))
    state = abstract_state(config, networks)
    reference = state.actor if config.needs_reference else None
    rows = rows_per_microbatch(config, mesh)
    batch = abstract_batch(config, mesh, rows)
    score = jax.jit(make_score_step(config, actor, mesh, critic)).trace(state, reference, batch)
    experience = jax.tree.map(lambda x: _placed(x.shape, x.dtype, mesh), score.out_info)
    update_step: Any = make_update_step(config, actor, mesh, critic)  # a jitted function
    update = update_step.trace(state, experience)
    return Traced(
        config=config,
        mesh=mesh,
        actor=actor,
        critic=critic,
        state=state,
        reference=reference,
        batch=batch,
        rows=rows,
        score=_program(score, (state, reference, batch)),
        update=_program(update, (state, experience)),
    )


def on_a_gpu(config: Config, mesh: Mesh) -> Config:
    """The config with every axis and the number of steps known, and its layers in one loop, which compiles fast."""
    steps = config.trainer.total_training_steps
    return dataclasses.replace(
        config,
        mesh=MeshConfig(**mesh.shape),
        model=dataclasses.replace(config.model, layers="scan"),
        trainer=dataclasses.replace(config.trainer, total_training_steps=1 if steps is None else steps),
    )


def for_plan(config: Config, model: Model) -> Model:
    """The model with the kernel's stand-in, unless the config asks for scores in memory."""
    return model if config.model.attention == "xla" else dataclasses.replace(model, kernel=blockwise_attention)


def abstract_batch(config: Config, mesh: Mesh, rows: int) -> PackedBatch:
    """What `pack` gives of one step's sequences, and `place_rows` lays out."""
    minibatches = config.minibatches_per_epoch
    sequences = config.actor.ppo_mini_batch_size * config.rollout.n
    capacity = math.ceil(rows_bound(sequences, config.max_sequence_length, config.row_length) / rows)
    shape = (minibatches, capacity, rows, config.row_length)

    def of(dtype: Any, shape: tuple[int, ...] = shape) -> Any:
        return _placed(shape, dtype, mesh)

    return PackedBatch(
        tokens=of(jnp.int32),
        positions=of(jnp.int32),
        segment_ids=of(jnp.int32),
        mask=of(jnp.bool_),
        scores=of(jnp.float32),
        rollout_logp=of(jnp.float32),
        group_ids=of(jnp.int32),
        baselines=of(jnp.float32),
        num_microbatches=of(jnp.int32, (minibatches,)),
        num_sequences=of(jnp.int32, ()),
    )


def bytes_per_device(tree: Any) -> int:
    """Of a tree of shapes with shardings, on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _placed(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    sharding: NamedSharding = row_sharding(mesh, 2) if len(shape) == 4 else replicated(mesh)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _program(traced: Any, arguments: tuple) -> Program:
    return Program(jaxpr=traced.jaxpr, compile=lambda: traced.lower().compile(), arguments=arguments)
