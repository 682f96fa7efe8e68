"""Everything that a run needs before its first step, built from the config alone."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from jax.sharding import Mesh

from jaxppo.config import Config
from jaxppo.data.chat import eos_ids, load_tokenizer
from jaxppo.data.loader import PromptLoader
from jaxppo.data.prompts import PromptSet, load_prompts
from jaxppo.models import Model
from jaxppo.models.kernels import verify_kernels
from jaxppo.parallel.mesh import make_mesh
from jaxppo.rewards.functions import BUILT_IN
from jaxppo.rewards.scoring import Reward, open_reward
from jaxppo.rollout.engine import Engine, Sampling
from jaxppo.rollout.jax_engine import JaxEngine
from jaxppo.rollout.vllm_engine import start_vllm
from jaxppo.run.checkpoint import Checkpoints, Recovery, check_resumable, restore, take
from jaxppo.run.networks import abstract_state, first_state, make_networks, reference_params
from jaxppo.run.notes import controller_notes, resume_notes
from jaxppo.run.programs import Programs, with_rates
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
    networks = make_networks(config, mesh)
    folder = networks.folder
    tokenizer = load_tokenizer(str(folder), trust_remote_code=config.model.trust_remote_code)
    reward = open_reward(config.reward)
    train, val, loader = _load_data(config, tokenizer)
    total = config.trainer.total_training_steps
    steps = config.trainer.total_epochs * loader.steps_per_epoch if total is None else total
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, total_training_steps=steps))

    if networks.actor.attention != "xla":
        verify_kernels(networks.actor.attention)
    checkpoints = Checkpoints(config.trainer.output_dir, config.trainer.max_ckpt_to_keep, config.trainer.best_metric)
    programs, recovery = Programs(config, mesh, networks.actor, networks.critic), Recovery(0, None)
    notes = _describe(config, mesh, programs.rows, train, val, loader) + controller_notes(config)
    found, line = checkpoints.find(config.trainer.resume), None
    notes += checkpoints.notes
    if found is None:
        state = first_state(config, networks)
    else:
        resumed = restore(found, abstract_state(config, networks))
        notes += resume_notes(found, resumed.config, config) + check_resumable(resumed, config, train.fingerprint)
        state, line, recovery = resumed.state, resumed.line, resumed.recovery
        if "data" in config.trainer.load_contents:
            loader.load_state_dict(resumed.data)
        whole = set(config.trainer.load_contents) >= {"model", "optimizer", "controller"}
        state = take(state, None if whole else first_state(config, networks), config)
        if recovery.rates is not None and not any("ctor.lr" in n or "critic.lr" in n for n in notes):
            programs.build(with_rates(config, recovery.rates))
            notes.append(
                f"after {recovery.rollbacks} roll-backs: actor.lr = {recovery.rates[0]:g}, critic.lr = "
                f"{recovery.rates[1]:g} instead of the config's"
            )
        if int(state.step) >= steps:
            notes.append(f"all {steps} steps are done: trainer.total_training_steps sets a later end")
    checkpoints.refuse_later(int(state.step))
    eos = eos_ids(folder, tokenizer)
    return Run(
        config=config,
        mesh=mesh,
        tokenizer=tokenizer,
        train=train,
        val=val,
        loader=loader,
        reward=reward,
        engine=_engine(config, networks.actor, str(folder), mesh),
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
        reference=reference_params(config, networks),
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


def _engine(config: Config, model: Model, folder: str, mesh: Mesh) -> Engine:
    if config.rollout.engine == "vllm":
        return start_vllm(config, model.config, folder, mesh)
    return JaxEngine(
        model,
        max_num_seqs=config.rollout.max_num_seqs,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
    )
