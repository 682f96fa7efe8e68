"""Stand-ins for a real network, where a test needs to know every logit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo.models import Architecture, KVCache, Model
from tests.tiny import HF_CONFIG, VOCAB


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableModel(Model):
    """A model whose parameters are a table: its row for the last token are the logits [VOCAB] of the next one."""

    config: Architecture = dataclasses.field(default_factory=lambda: Architecture.from_dict(HF_CONFIG))
    windows: list[int] = dataclasses.field(default_factory=list)
    """Of each decode step that has run, how much of the cache it was told to read."""

    def forward_cached(
        self, params: Any, tokens: jax.Array, positions: jax.Array, cache: KVCache, window: int | None = None
    ) -> tuple[jax.Array, KVCache]:
        if window is not None:
            jax.debug.callback(lambda: self.windows.append(window))
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
