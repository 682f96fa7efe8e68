"""What the trainer asks of an engine: token ids in, token ids and their log-probabilities out."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """One request's sampling distribution: softmax(logits / temperature), cut to top_k then top_p."""

    temperature: float
    """0 is greedy; log-probabilities are then those of temperature 1."""
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    """Any of these ends a response and belongs to it."""
    top_k: int = -1
    top_p: float = 1.0
    n: int = 1


@dataclasses.dataclass(frozen=True)
class Completion:
    """One response.

    Example: tokens [5, 6, 2], logprobs [-0.1, -0.7, -0.01], finish_reason "stop" (2 is an EOS id).
    Raises ValueError where tokens and logprobs differ in length.
    """

    tokens: np.ndarray
    """[length] int32, EOS included."""
    logprobs: np.ndarray
    """[length] float32, nats, of the distribution that was sampled from."""
    finish_reason: Literal["stop", "length"]
    weights_version: int

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(
                f"an engine returned {len(self.tokens)} tokens with {len(self.logprobs)} log-probabilities"
            )


class Engine(Protocol):
    """A sampler of responses. The same prompts, sampling, key and weights give the same tokens."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: jax.Array) -> list[Completion]:
        """len(prompts) * sampling.n completions, all of a prompt's side by side.

        Sample j of prompt i draws from fold_in(fold_in(key, i), j): no other prompt changes its tokens.
        """
        ...

    def publish(self, params: Any, version: int) -> int:
        """Sample from these actor parameters from now on. Returns the bytes that each device copied for it."""
        ...

    def sleep(self) -> None:
        """The trainer is done with responses until the next publish: memory that only they need may go."""
        ...
