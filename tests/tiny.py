"""The smallest real model and batches, for every test that needs one."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxppo.config import ActorConfig, AlgorithmConfig, Config, DataConfig
from jaxppo.models import Model, load
from jaxppo.models.config import Architecture
from jaxppo.models.heads import init_value_head
from jaxppo.parallel.collectives import collectives
from jaxppo.parallel.mesh import constrain_fn, num_row_shards
from jaxppo.step.packing import Rollout
from jaxppo.step.state import PackedBatch, TrainState

VOCAB = 64
HF_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def tiny_model(seed: int = 0, dtype: str = "float32", **change: Any) -> Model:
    """A random 2-layer Llama; `change` goes to the Hugging Face config."""
    architecture = Architecture.from_dict(HF_CONFIG | change)
    return load(architecture, jax.random.key(seed), dtype=dtype, param_dtype=dtype, remat="full", attention="xla")


def on_mesh(model: Model, mesh: Mesh) -> Model:
    """The same, spread over a mesh."""
    return dataclasses.replace(
        model, constrain=constrain_fn(mesh), row_shards=num_row_shards(mesh), mesh=collectives(mesh)
    )


def critic_params(model: Model, seed: int = 1) -> Any:
    """A backbone of its own with a value head whose values are not all zero."""
    backbone = tiny_model(seed, str(np.dtype(model.param_dtype))).params
    head = init_value_head(model.config, model.param_dtype)
    kernel = 0.1 * jax.random.normal(jax.random.key(seed + 2), head["kernel"].shape, head["kernel"].dtype)
    return {**backbone, "value_head": {**head, "kernel": kernel}}


def tiny_config(**actor: Any) -> Config:
    """12 prompts in 2 minibatches, sequences of up to 4 + 6 tokens, rows of 20."""
    defaults: dict[str, Any] = {"ppo_mini_batch_size": 6, "max_tokens_per_device": 20, "row_length": 20, "lr": 1e-3}
    config = Config(
        data=DataConfig(train_batch_size=12, max_prompt_length=4, max_response_length=6),
        algorithm=AlgorithmConfig(use_kl_in_reward=True, lam=0.95),
        actor=ActorConfig(**(defaults | actor)),
    )
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, total_training_steps=10))


def random_rollouts(n: int = 12, seed: int = 0) -> list[Rollout]:
    """Sequences of 1 to 4 prompt and 1 to 6 response tokens."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for i in range(n):
        prompt, response = rng.integers(1, 5), rng.integers(1, 7)
        rollouts.append(
            Rollout(
                rng.integers(3, VOCAB, prompt).astype(np.int32),
                rng.integers(3, VOCAB, response).astype(np.int32),
                rng.normal(-4, 0.1, response).astype(np.float32),
                float(rng.integers(0, 2)),
                group=i // 3,
                baseline=0.25,
            )
        )
    return rollouts


def pad(rollouts: list[Rollout], width: int, rows: int, minibatches: int = 1) -> PackedBatch:
    """The oracle of packing: one sequence a row, right-padded."""
    count = len(rollouts) // minibatches
    microbatches = -(-count // rows)
    shape = (minibatches, microbatches * rows, width)
    arrays: dict[str, np.ndarray] = {
        "tokens": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "mask": np.zeros(shape, bool),
        "scores": np.zeros(shape, np.float32),
        "rollout_logp": np.zeros(shape, np.float32),
        "group_ids": np.zeros(shape, np.int32),
        "baselines": np.zeros(shape, np.float32),
    }
    for i, r in enumerate(rollouts):
        m, row = divmod(i, count)
        prompt, end = len(r.prompt), len(r)
        arrays["tokens"][m, row, :end] = np.concatenate([r.prompt, r.response])
        arrays["positions"][m, row, :end] = range(end)
        arrays["segment_ids"][m, row, :end] = 1
        arrays["mask"][m, row, prompt:end] = r.in_loss
        arrays["scores"][m, row, :end] = r.score
        arrays["rollout_logp"][m, row, prompt:end] = r.logprobs
        arrays["group_ids"][m, row, :end] = r.group
        arrays["baselines"][m, row, :end] = r.baseline
    split = (minibatches, microbatches, rows, width)
    return PackedBatch(
        **{name: x.reshape(split) for name, x in arrays.items()},
        num_microbatches=np.full(minibatches, microbatches, np.int32),
        num_sequences=np.int32(len(rollouts)),
    )


def place_state(state: TrainState, shardings: TrainState) -> TrainState:
    """The same state in its own buffers on the mesh."""

    def place(x: Any, sharding: NamedSharding) -> jax.Array:
        return jax.device_put(x, sharding, may_alias=False)

    return jax.tree.map(place, state, shardings)
