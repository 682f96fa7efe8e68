"""Everything that a run needs before its first step, built from the config alone."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jaxppo.config import Config, ConfigError
from jaxppo.data.chat import eos_ids, load_tokenizer
from jaxppo.data.loader import PromptLoader
from jaxppo.data.prompts import PromptSet, load_prompts
from jaxppo.models import Architecture, Model, init_params, load
from jaxppo.models.heads import init_value_head
from jaxppo.models.huggingface import load_params, resolve_folder
from jaxppo.models.kernels import verify_kernels
from jaxppo.parallel.collectives import collectives
from jaxppo.parallel.fits import check_fits
from jaxppo.parallel.mesh import constrain_fn, make_mesh, num_row_shards
from jaxppo.parallel.offload import to_host
from jaxppo.rewards.functions import BUILT_IN
from jaxppo.rewards.scoring import Reward, open_reward
from jaxppo.rollout.engine import Engine, Sampling
from jaxppo.rollout.jax_engine import JaxEngine
from jaxppo.rollout.vllm_engine import start_vllm
from jaxppo.run.checkpoint import Checkpoints, Recovery, check_resumable, restore, take
from jaxppo.run.notes import controller_notes, resume_notes
from jaxppo.run.programs import Programs, with_rates
from jaxppo.step.init import actor_shardings, init_state, state_shardings
from jaxppo.step.state import Params, TrainState


@dataclasses.dataclass(kw_only=True)
class Run:
    """The parts of a run, ready for step `state.step`."""

    config: Config
    """As it was given, with trainer.total_training_steps resolved; `programs.config` is what acts."""
    mesh: Mesh
    tokenizer: Any
    train: PromptSet
    val: PromptSet | None
    loader: PromptLoader
    reward: Reward
    engine: Engine
    sampling: Sampling
    val_sampling: Sampling
    programs: Programs
    state: TrainState
    resumed: Mapping[str, Any] | None
    """Of the checkpoint that the run goes on from: its step's line of metrics; None for a new run."""
    reference: Params | None
    checkpoints: Checkpoints
    recovery: Recovery
    """The roll-backs so far."""
    out_of_memory: int = 0
    """How often this process had to do with less."""
    notes: tuple[str, ...]
    """What a person should know before the first step."""


def build(config: Config) -> Run:
    """Loads data and models, finds the checkpoint to go on from, and makes the step functions."""
    mesh = make_mesh(config.mesh)
    folder = resolve_folder(config.model.path)
    tokenizer = load_tokenizer(str(folder), trust_remote_code=config.model.trust_remote_code)
    reward = open_reward(config.reward)
    train, val, loader = _load_data(config, tokenizer)
    total = config.trainer.total_training_steps
    steps = config.trainer.total_epochs * loader.steps_per_epoch if total is None else total
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, total_training_steps=steps))

    actor_model = _model(config, str(folder), mesh)
    if actor_model.attention != "xla":
        verify_kernels(actor_model.attention)
    critic_path = folder if config.critic.path is None else resolve_folder(config.critic.path, "critic.path")
    critic_model = _model(config, str(critic_path), mesh)
    if critic_model.config.vocab_size != actor_model.config.vocab_size:
        raise ConfigError(
            f"critic.path = {config.critic.path}: its vocabulary of {critic_model.config.vocab_size} is not the "
            f"actor's {actor_model.config.vocab_size}: both read the same token ids"
        )
    check_fits(mesh, actor_model.config, "model.path", config.row_length)
    check_fits(mesh, critic_model.config, "critic.path", config.row_length)
    checkpoints = Checkpoints(config.trainer.output_dir, config.trainer.max_ckpt_to_keep, config.trainer.best_metric)
    programs, recovery = Programs(config, mesh, actor_model, critic_model), Recovery(0, None)
    notes = _describe(config, mesh, programs.rows, train, val, loader) + controller_notes(config)
    found, line = checkpoints.find(config.trainer.resume), None
    notes += checkpoints.notes
    if found is None:
        state = _first_state(config, actor_model, critic_model, str(folder), str(critic_path), mesh)
    else:
        resumed = restore(found, _abstract_state(config, actor_model, critic_model, mesh))
        notes += resume_notes(found, resumed.config, config) + check_resumable(resumed, config, train.fingerprint)
        state, line, recovery = resumed.state, resumed.line, resumed.recovery
        if "data" in config.trainer.load_contents:
            loader.load_state_dict(resumed.data)
        if set(config.trainer.load_contents) >= {"model", "optimizer", "controller"}:
            first = None
        else:
            first = _first_state(config, actor_model, critic_model, str(folder), str(critic_path), mesh)
        state = take(state, first, config)
        if recovery.rates is not None and not any("ctor.lr" in n or "critic.lr" in n for n in notes):
            programs.build(with_rates(config, recovery.rates))
            notes.append(
                f"after {recovery.rollbacks} roll-backs: actor.lr = {recovery.rates[0]:g}, critic.lr = "
                f"{recovery.rates[1]:g} instead of the config's"
            )
        if int(state.step) >= steps:
            notes.append(f"all {steps} steps are done: trainer.total_training_steps sets a later end")
    checkpoints.refuse_later(int(state.step))
    reference = None
    if config.needs_reference:
        reference = _base_params(config, actor_model, str(folder), 0)
        reference = jax.device_put(reference, actor_shardings(actor_model, mesh))
        if "reference" in config.rollout.offload:
            reference = to_host(reference)
    eos = eos_ids(folder, tokenizer)
    return Run(
        config=config,
        mesh=mesh,
        tokenizer=tokenizer,
        train=train,
        val=val,
        loader=loader,
        reward=reward,
        engine=_engine(config, actor_model, str(folder), mesh),
        sampling=Sampling(
            temperature=config.rollout.temperature,
            top_k=config.rollout.top_k,
            top_p=config.rollout.top_p,
            n=config.rollout.n,
            max_new_tokens=config.data.max_response_length,
            eos_ids=eos,
        ),
        val_sampling=Sampling(
            temperature=config.rollout.val_temperature,
            top_k=config.rollout.val_top_k,
            top_p=config.rollout.val_top_p,
            n=config.rollout.val_n,
            max_new_tokens=config.data.max_response_length,
            eos_ids=eos,
        ),
        programs=programs,
        state=state,
        resumed=line,
        reference=reference,
        checkpoints=checkpoints,
        recovery=recovery,
        notes=tuple(notes),
    )


def _describe(
    config: Config, mesh: Mesh, rows: int, train: PromptSet, val: PromptSet | None, loader: PromptLoader
) -> list[str]:
    """What the config comes down to, as lines."""
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return [
        f"{len(train.prompts)} training prompts ({train.dropped} overlong ones dropped, {train.truncated} truncated), "
        f"{len(val.prompts) if val else 0} for validation",
        f"{config.trainer.total_training_steps} steps, {loader.steps_per_epoch} an epoch; microbatches of {rows} rows "
        f"of {config.row_length} tokens",
        f"{mesh.size} {mesh.devices.flat[0].platform} device(s): {axes}; all settings in "
        f"{config.trainer.output_dir}/config.json",
    ]


def _load_data(config: Config, tokenizer: Any) -> tuple[PromptSet, PromptSet | None, PromptLoader]:
    data = config.data
    needs_truth = config.reward.function in BUILT_IN
    load = partial(load_prompts, config=data, tokenizer=tokenizer, needs_truth=needs_truth)
    train = load(data.train_files, max_samples=data.train_max_samples, setting="data.train_files")
    val = None
    if data.val_files:
        val = load(data.val_files, max_samples=data.val_max_samples, setting="data.val_files")
    loader = PromptLoader(train.prompts, data.train_batch_size, shuffle=data.shuffle, seed=data.seed)
    return train, val, loader


def check_positions(config: Config, architecture: Architecture, folder: str) -> None:
    """Raises ConfigError where a sequence can be longer than the network has positions for."""
    limit, data = architecture.max_positions, config.data
    if limit is not None and config.max_sequence_length > limit:
        raise ConfigError(
            f"data.max_prompt_length = {data.max_prompt_length} and data.max_response_length = "
            f"{data.max_response_length}: together at most the {limit} positions of {folder} (max_position_embeddings "
            "of its config.json, rope scaling counted)"
        )


def _model(config: Config, folder: str, mesh: Mesh) -> Model:
    """A network's functions, without parameters."""
    architecture = Architecture.from_folder(folder)
    check_positions(config, architecture, folder)
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


def _base_params(config: Config, model: Model, folder: str, salt: int, *, critic: bool = False) -> Params:
    """The parameters that training starts from; `salt` tells random networks apart."""
    if config.model.init == "pretrained":
        return load_params(resolve_folder(folder), model.config, model.param_dtype, critic=critic)
    key = jax.random.fold_in(jax.random.key(config.trainer.seed), salt)
    params = init_params(model.config, key, model.param_dtype)
    return {**params, "value_head": init_value_head(model.config)} if critic else params


def _first_state(
    config: Config, actor: Model, critic: Model, folder: str, critic_folder: str, mesh: Mesh
) -> TrainState:
    shardings = state_shardings(config, actor, critic, mesh)
    actor_params = jax.device_put(_base_params(config, actor, folder, 0), shardings.actor)
    critic_params = None
    if config.needs_critic:
        critic_params = jax.device_put(_base_params(config, critic, critic_folder, 1, critic=True), shardings.critic)
    init = jax.jit(partial(init_state, config), out_shardings=shardings, donate_argnums=(0, 1))
    return init(actor_params, critic_params, jax.random.key(config.trainer.seed))


def _abstract_state(config: Config, actor: Model, critic: Model, mesh: Mesh) -> TrainState:
    """Shapes and layouts of a TrainState, nothing allocated."""
    shardings = state_shardings(config, actor, critic, mesh)

    def init() -> TrainState:
        key = jax.random.key(config.trainer.seed)
        actor_params = init_params(actor.config, key, actor.param_dtype)
        critic_params = init_params(critic.config, key, critic.param_dtype)
        return init_state(config, actor_params, {**critic_params, "value_head": init_value_head(critic.config)}, key)

    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(init), shardings
    )


def _engine(config: Config, model: Model, folder: str, mesh: Mesh) -> Engine:
    if config.rollout.engine == "vllm":
        return start_vllm(config, model.config, folder, mesh)
    return JaxEngine(
        model,
        max_num_seqs=config.rollout.max_num_seqs,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
    )
