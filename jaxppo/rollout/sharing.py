"""Which prompts each of several data-parallel engines answers, and how all of them come to know all answers."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxppo.rollout.engine import Completion

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
"""tokens and log-probabilities [completions, longest], and [completions, 3]: length, was truncated, version."""


def share(prompts: int, engines: int, index: int) -> range:
    """The prompts of engine `index`: every `engines`-th. Example: share(5, 2, 1) is 1, 3."""
    return range(index, prompts, engines)


def gather(mine: Sequence[Completion], prompts: int, n: int, longest: int, engines: int) -> list[Completion]:
    """All prompts * n completions, in the prompts' order, on every process, from each engine's own.

    A collective: every process calls it. Those of one tensor-parallel engine hold the same completions.
    """
    if engines == 1:
        return list(mine)
    arrays = to_arrays(mine, -(-prompts // engines) * n, longest)
    gathered = multihost_utils.process_allgather(arrays)
    per_engine = jax.process_count() // engines
    return merge([tuple(x[e * per_engine] for x in gathered) for e in range(engines)], prompts, n)


def to_arrays(completions: Sequence[Completion], capacity: int, longest: int) -> Arrays:
    tokens, logprobs = np.zeros((capacity, longest), np.int32), np.zeros((capacity, longest), np.float32)
    numbers = np.zeros((capacity, 3), np.int32)
    for row, completion in enumerate(completions):
        length = len(completion.tokens)
        tokens[row, :length], logprobs[row, :length] = completion.tokens, completion.logprobs
        numbers[row] = length, completion.finish_reason == "length", completion.weights_version
    return tokens, logprobs, numbers


def merge(engines: Sequence[Arrays], prompts: int, n: int) -> list[Completion]:
    """The inverse of `share` and `to_arrays`."""
    completions = []
    for i in range(prompts):
        tokens, logprobs, numbers = engines[i % len(engines)]
        for row in range(i // len(engines) * n, i // len(engines) * n + n):
            length, truncated, version = map(int, numbers[row])
            reason = "length" if truncated else "stop"
            completions.append(Completion(tokens[row, :length], logprobs[row, :length], reason, version))
    return completions
