"""Batches of prompts in an order that is a pure function of the seed and the position, so that a run can resume."""

from collections.abc import Sequence
from typing import Any

import grain

from jaxppo.config import ConfigError
from jaxppo.data.prompts import Prompt


class PromptLoader:
    """An endless iterator of batches; every epoch has its own order and drops its last partial batch.

    Raises ConfigError where there are fewer prompts than a batch needs, or the seed does not fit 32 bits.
    """

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, *, shuffle: bool, seed: int) -> None:
        if len(prompts) < batch_size:
            raise ConfigError(
                f"data.train_batch_size = {batch_size}, but data.train_files have only {len(prompts)} prompts: "
                f"at most {len(prompts)} is possible"
            )
        if not 0 <= seed < 2**32:
            raise ConfigError(f"data.seed = {seed}: valid are 0 to {2**32 - 1}")
        self.steps_per_epoch = len(prompts) // batch_size
        order = grain.MapDataset.source(prompts)
        order = order.shuffle(seed=seed) if shuffle else order
        self._batches = order.batch(batch_size, drop_remainder=True, batch_fn=list).repeat()
        self._position = 0

    @property
    def epoch(self) -> int:
        """Of the next batch, from 0."""
        return self._position // self.steps_per_epoch

    def __iter__(self) -> "PromptLoader":
        return self

    def __next__(self) -> list[Prompt]:
        batch = self._batches[self._position]
        assert batch is not None  # nothing is filtered here
        self._position += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch stands."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]
