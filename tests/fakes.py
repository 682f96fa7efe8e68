"""Stand-ins for a real network, where a test needs to know every logit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo.config import RewardConfig
from jaxppo.models import Architecture, KVCache, Model
from jaxppo.rewards.scoring import Reward, run_here
from tests.tiny import HF_CONFIG, VOCAB


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableModel(Model):
    """A model whose parameters are a table: its row for the last token are the logits [VOCAB] of the next one."""

    config: Architecture = dataclasses.field(default_factory=lambda: Architecture.from_dict(HF_CONFIG))
    steps: list[int] = dataclasses.field(default_factory=list)
    """Of each decode step that has run, how many slots were active."""

    def prefill(
        self, params: Any, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        c = self.config
        empty = jnp.zeros((c.num_layers, *tokens.shape, c.num_kv_heads, c.head_dim), self.dtype)
        return jax.nn.one_hot(tokens, VOCAB), empty, empty

    def decoding_params(self, params: Any) -> Any:
        return params

    def decode(
        self, params: Any, tokens: jax.Array, positions: jax.Array, active: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        jax.debug.callback(lambda n: self.steps.append(int(n)), jnp.sum(active))
        return jax.nn.one_hot(tokens, VOCAB), cache

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        return hidden @ params


UNIFORM = np.zeros((VOCAB, VOCAB), np.float32)
"""The table that prefers no token."""


def script(*chains: list[int]) -> jax.Array:
    """The table that makes each chain's next token certain: script([20, 5, 2]) answers 20 with 5 and 5 with 2."""
    table = UNIFORM.copy()
    for chain in chains:
        table[chain[:-1], chain[1:]] = 100.0
    return jnp.asarray(table)


def independent(p: list[float]) -> jax.Array:
    """The table that draws token i with probability p[i], whatever came before."""
    row = np.full(VOCAB, -1e9, np.float32)  # finite: 0 times infinity is NaN
    row[: len(p)] = np.log(p)
    return jnp.asarray(np.tile(row, (VOCAB, 1)))


def reward_of(function, **settings) -> Reward:
    """A reward that calls a function in the test's own process."""
    config = RewardConfig(function="mine", timeout_s=1.0, **settings)
    return Reward(config, run_here(function, config.timeout_s), lambda: None)
