"""A config's plan: what one device holds, computes and sends in a PPO step, and what of it does not fit."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo.config import Config
from jaxppo.models.decode_attention import BLOCK
from jaxppo.models.parameters import count_params
from jaxppo.parallel.mesh import num_row_shards
from jaxppo.parallel.platform import RESERVED
from jaxppo.planning import rates
from jaxppo.planning.counting import Collective, count
from jaxppo.planning.flops import expected_trips, forward_flops
from jaxppo.planning.program import Traced, bytes_per_device, trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device."""

    parameters: Mapping[str, int]
    """Of actor, critic and reference, as far as there are any."""
    optimizer: int
    gradients: int
    """float32 sums of the larger network: one network is updated at a time."""
    batch: int
    """Everything the update reads of the step's sequences."""
    score_temporaries: int
    update_temporaries: int
    """What XLA allocates beside arguments and results; the gradients are in it."""
    update_arguments: int
    """By XLA's analysis: state (without the reference) and batch, as the rows above say from shapes alone."""
    rollout: int
    """The engine's: vLLM's share, or weights and KV cache of the built-in one."""
    rollout_stays: bool
    """Also during the update."""

    @property
    def state(self) -> int:
        """What is there in every phase."""
        return sum(self.parameters.values()) + self.optimizer

    @property
    def peaks(self) -> dict[str, int]:
        """Of each phase."""
        kept = self.rollout if self.rollout_stays else 0
        return {
            "rollout": self.state + self.rollout,
            "score": self.state + kept + self.batch + self.score_temporaries,
            "update": self.state + kept + self.batch + self.update_temporaries,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All figures are of one device and one PPO step."""

    config: Config
    device: rates.Device
    sizes: Mapping[str, int]
    """Of the mesh's axes."""
    parameters: int
    """Of the actor, over all devices."""
    length: int
    """Tokens of each sequence, by assumption."""
    rows: int
    """Of one microbatch, over all devices."""
    tokens: int
    """Of the sequences, over all devices."""
    padded_tokens: int
    """Of the rows that are computed."""
    memory: Memory
    model_flops: Mapping[str, float]
    """Of score and update, as a text book counts."""
    flops: Mapping[str, float]
    """As compiled: recomputation and padding included."""
    sent: Mapping[str, Counter[Collective]]
    """Bytes."""

    @property
    def rows_per_device(self) -> int:
        """Of one microbatch, on the devices that share rows."""
        return self.rows // (self.sizes["data"] * self.sizes["fsdp"])

    @property
    def optimizer_traffic(self) -> float:
        """HBM bytes of the optimizer steps: parameters and moments read and written, gradients read."""
        steps = self.config.actor.ppo_epochs * self.config.minibatches_per_epoch
        trained = sum(size for name, size in self.memory.parameters.items() if name != "reference")
        return steps * (3.0 * trained + 2.0 * self.memory.optimizer)

    @property
    def capacity(self) -> float:
        """Bytes that there are to fill."""
        return rates.RATES[self.device].memory * (1 - RESERVED)


def make_plan(config: Config, device: rates.Device, share: float) -> Plan:
    """Compiles both steps. `share` of their maximal length is what every sequence is taken to have."""
    programs = trace(config)
    config, sizes = programs.config, dict(programs.mesh.shape)
    length = max(2, round(share * config.max_sequence_length))
    shards = num_row_shards(programs.mesh)
    trips = expected_trips(config, programs.actor.config, programs.rows, shards, length)
    counted = {name: count(getattr(programs, name).jaxpr, sizes, trips) for name in ("score", "update")}
    microbatches = trips.microbatches * config.minibatches_per_epoch
    return Plan(
        config=config,
        device=device,
        sizes=sizes,
        parameters=count_params(programs.actor.config),
        length=length,
        rows=programs.rows,
        tokens=length * config.sequences_per_step,
        padded_tokens=round(microbatches * programs.rows * config.row_length),
        memory=measure(programs, device),
        model_flops=model_flops_of(programs, length),
        flops={name: c.flops for name, c in counted.items()},
        sent={name: c.sent for name, c in counted.items()},
    )


def model_flops_of(programs: Traced, length: int) -> dict[str, float]:
    """Of one device: every pass of the step over sequences of `length` tokens, three forward's worth an update."""
    config = programs.config
    lengths = np.full(config.sequences_per_step, length)
    actor = forward_flops(programs.actor.config, lengths, head=True) / programs.mesh.size
    critic = forward_flops(programs.critic.config, lengths, head=False) / programs.mesh.size * config.needs_critic
    passes = config.needs_old_logp + config.needs_reference
    return {"score": passes * actor + critic, "update": 3 * config.actor.ppo_epochs * (actor + critic)}


def measure(programs: Traced, device: rates.Device) -> Memory:
    """Sizes of the arguments by their layout, temporaries by XLA's own analysis of what it compiled."""
    state, config = programs.state, programs.config
    networks = {"actor": state.actor, "critic": state.critic, "reference": programs.reference}
    parameters = {name: bytes_per_device(x) for name, x in networks.items() if x is not None}
    score, update = (p.compile().memory_analysis() for p in (programs.score, programs.update))
    vllm = config.rollout.engine == "vllm"
    total = rates.RATES[device].memory
    return Memory(
        parameters=parameters,
        optimizer=bytes_per_device((state.actor_opt, state.critic_opt)),
        gradients=max(_wide_bytes(x) for x in (state.actor, state.critic) if x is not None),
        batch=bytes_per_device(programs.update.arguments[1]),
        score_temporaries=score.temp_size_in_bytes,
        update_temporaries=update.temp_size_in_bytes,
        update_arguments=update.argument_size_in_bytes,
        rollout=round(config.rollout.gpu_memory_utilization * total) if vllm else built_in_engine_bytes(programs),
        rollout_stays=vllm and config.rollout.sleep_level == 0,
    )


def built_in_engine_bytes(programs: Traced) -> int:
    """Of `Model.decoding_params` (whole but for the tensor axis) and of its KV cache, in the compute dtype."""
    config, model, mesh = programs.config, programs.actor, programs.mesh
    itemsize = jnp.dtype(model.dtype).itemsize
    network = model.config
    places = config.rollout.max_num_seqs * -(-config.max_sequence_length // BLOCK) * BLOCK
    vectors = 2 * network.num_layers * network.num_kv_heads * network.head_dim
    heads = mesh.shape["tensor"] if model.config.num_kv_heads % mesh.shape["tensor"] == 0 else 1
    cached = places * vectors * itemsize // (num_row_shards(mesh) * heads)
    return count_params(model.config) * itemsize // mesh.shape["tensor"] + cached


def _wide_bytes(tree: Any) -> int:
    """As gradients are summed: in float32 at least."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * max(4, x.dtype.itemsize) for x in jax.tree.leaves(tree))
