"""The compiled programs of a step, which can be built again: smaller after out of memory, slower after a roll-back."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from jaxppo.config import Config, OptimizerConfig, UserError
from jaxppo.models import Model
from jaxppo.parallel.mesh import num_row_shards
from jaxppo.step.packing import rows_bound
from jaxppo.step.score import make_score_step
from jaxppo.step.update import make_update_step


def is_out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


class Programs:
    """score and update of one config, and how many rows a microbatch of theirs has (`rows`, over all devices)."""

    def __init__(self, config: Config, mesh: Mesh, actor: Model, critic: Model) -> None:
        self._mesh, self._actor, self._critic = mesh, actor, critic
        self.build(config)

    def build(self, config: Config) -> None:
        self.config = config
        self.rows = rows_per_microbatch(config, self._mesh)
        self.score = make_score_step(config, self._actor, self._mesh, self._critic)
        self.update = make_update_step(config, self._actor, self._mesh, self._critic)
        self._fits = False

    def shrink(self) -> str:
        """Builds programs of a fifth fewer tokens a microbatch, and says so. Their gradients are the same.

        Raises UserError where a microbatch is one row already and the row no longer than the longest sequence.
        """
        before = self.config.actor.max_tokens_per_device
        self.build(with_less_memory(self.config, self.rows // num_row_shards(self._mesh)))
        return (
            f"out of memory: actor.max_tokens_per_device is {self.config.actor.max_tokens_per_device} instead of "
            f"{before} from here on; the step is repeated"
        )

    def check_room(self, *arguments: Any) -> None:
        """Before the first update, whose arguments are dead once it was dispatched: raises JaxRuntimeError
        where the device's free memory is less than the compiled program needs beside them.

        Devices that do not tell (the CPU) are taken at their word.
        """
        stats = self._mesh.local_devices[0].memory_stats()
        if self._fits or not stats or "bytes_limit" not in stats:
            return
        update: Any = self.update
        needs = update.lower(*arguments).compile().memory_analysis()
        new = needs.temp_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes
        free = stats["bytes_limit"] - stats["bytes_in_use"]
        if new > free:
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: the update needs {new} bytes, {free} are free")
        self._fits = True

    def slow_down(self) -> str:
        """Builds programs with the learning rates that guards.rollback_lr or rollback_factor ask for."""
        guards, actor, critic = self.config.guards, self.config.actor, self.config.critic
        factor = guards.rollback_factor
        if guards.rollback_lr is not None and actor.lr > guards.rollback_lr:
            factor = guards.rollback_lr / actor.lr
        self.build(with_rates(self.config, (actor.lr * factor, critic.lr * factor)))
        return f"actor.lr {actor.lr:g} -> {self.config.actor.lr:g}, critic.lr {critic.lr:g} -> {critic.lr * factor:g}"

    @property
    def rates(self) -> tuple[float, float]:
        return self.config.actor.lr, self.config.critic.lr


def with_rates(config: Config, rates: tuple[float, float]) -> Config:
    """The config with other learning rates of actor and critic."""

    def at(section: OptimizerConfig, lr: float) -> Any:
        return dataclasses.replace(section, lr=lr)

    return dataclasses.replace(config, actor=at(config.actor, rates[0]), critic=at(config.critic, rates[1]))


def with_less_memory(config: Config, rows: int) -> Config:
    """The config with a fifth fewer tokens of a microbatch than its `rows` rows have: whole rows, then shorter ones."""
    actor, group = config.actor, max(config.mesh.context, 1)
    wanted = int(0.8 * rows * config.row_length)
    if wanted >= config.row_length:
        tokens = wanted // config.row_length * config.row_length
        # a row's length follows max_tokens_per_device where it is not set, and must not change here
        actor = dataclasses.replace(actor, row_length=config.row_length)
    elif actor.row_length is None and config.row_length > config.max_sequence_length:
        tokens = max(wanted, config.max_sequence_length)
    else:
        raise UserError(
            f"out of memory with one row of {config.row_length} tokens: settings that need less are "
            "data.max_response_length, actor.row_length, model.remat = full, rollout.offload, a smaller "
            "rollout.gpu_memory_utilization, and more devices on mesh.fsdp or mesh.tensor"
        )
    return dataclasses.replace(config, actor=dataclasses.replace(actor, max_tokens_per_device=-(-tokens // group)))


def rows_per_microbatch(config: Config, mesh: Mesh) -> int:
    """As many rows as max_tokens_per_device allows where devices share rows, but no more than a minibatch can fill."""
    shards = num_row_shards(mesh)
    sequences = config.actor.ppo_mini_batch_size * config.rollout.n
    needed = rows_bound(sequences, config.max_sequence_length, config.row_length)
    return shards * min(config.tokens_per_row_group // config.row_length, -(-needed // shards))
