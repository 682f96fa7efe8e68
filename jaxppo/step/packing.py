"""Ragged sequences -> minibatches of packed rows, on the host, once per PPO step."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxppo.models.cudnn import max_segments
from jaxppo.step.state import PackedBatch


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One sampled sequence with its score.

    Example: prompt [7, 8], response [5, 2], logprobs [-0.1, -0.2], score 1.0. Raises ValueError where response
    and log-probabilities differ in length or the prompt is empty.
    """

    prompt: np.ndarray
    """[prompt tokens] int32, at least one."""
    response: np.ndarray
    """[response tokens] int32, EOS included."""
    logprobs: np.ndarray
    """[response tokens] float32, the engine's own, nats."""
    score: float
    in_loss: bool = True
    """False keeps the sequence out of every loss and statistic of tokens."""
    group: int = 0
    """Of its prompt, from 0."""
    baseline: float = 0.0
    """Score of the prompt's greedy response, for remax."""

    def __post_init__(self) -> None:
        if len(self.response) != len(self.logprobs):
            raise ValueError(f"{len(self.response)} response tokens but {len(self.logprobs)} log-probabilities")
        if not len(self.prompt):
            raise ValueError("a sequence needs at least one prompt token: the first response token follows it")

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def rows_bound(num_sequences: int, longest: int, row_length: int) -> int:
    """The most rows that `assign_rows` can open for `num_sequences` sequences of up to `longest` tokens.

    Of the rows that tokens filled, any two together hold more than one row's tokens; and all but one hold more than
    row_length - longest, since the sequence that opened a later row did not fit. Further rows may be full by number.
    """
    total = num_sequences * longest
    bound = max(1, 2 * math.ceil(total / row_length) - 1)
    if row_length > longest:
        bound = min(bound, total // (row_length - longest) + 1)
    return min(num_sequences, bound + num_sequences // max_segments(row_length))


def assign_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """First-fit decreasing: the sequences of each row, at most max_segments, by index. Ties keep their order."""
    rows: list[list[int]] = []
    free: list[int] = []
    most = max_segments(row_length)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, space in enumerate(free) if space >= lengths[i]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(row_length)
        rows[row].append(i)
        free[row] = free[row] - lengths[i] if len(rows[row]) < most else 0
    return rows


def pack(
    sequences: Sequence[Rollout],
    row_length: int,
    rows: int,
    *,
    minibatches: int = 1,
    longest: int | None = None,
) -> PackedBatch:
    """Packs each run of len(sequences) / minibatches sequences into microbatches of `rows` rows.

    The shape depends only on the arguments but the contents: K is enough for any lengths up to `longest`
    (default: row_length). Raises ValueError where a sequence is longer than that or the minibatches are unequal.
    """
    longest = row_length if longest is None else longest
    if longest > row_length:
        raise ValueError(f"sequences of up to {longest} tokens do not fit rows of {row_length}")
    if too_long := [len(s) for s in sequences if len(s) > longest]:
        raise ValueError(f"a sequence of {max(too_long)} tokens is longer than {longest}")
    if not sequences or len(sequences) % minibatches:
        raise ValueError(f"{len(sequences)} sequences do not split into {minibatches} equal minibatches")
    per_minibatch = len(sequences) // minibatches
    capacity = math.ceil(rows_bound(per_minibatch, longest, row_length) / rows)
    shape = (minibatches, capacity * rows, row_length)
    ints = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segment_ids", "group_ids")}
    floats = {name: np.zeros(shape, np.float32) for name in ("scores", "rollout_logp", "baselines")}
    mask = np.zeros(shape, bool)
    num_microbatches = np.zeros(minibatches, np.int32)
    for m in range(minibatches):
        chosen = sequences[m * per_minibatch : (m + 1) * per_minibatch]
        layout = assign_rows([len(s) for s in chosen], row_length)
        num_microbatches[m] = math.ceil(len(layout) / rows)
        for r, members in enumerate(layout):
            start = 0
            for segment, i in enumerate(members, 1):
                sequence, length = chosen[i], len(chosen[i])
                here, response = np.s_[m, r, start : start + length], np.s_[len(sequence.prompt) :]
                ints["tokens"][here] = np.concatenate([sequence.prompt, sequence.response])
                ints["positions"][here] = np.arange(length)
                ints["segment_ids"][here] = segment
                mask[here][response] = sequence.in_loss
                ints["group_ids"][here] = sequence.group
                floats["scores"][here] = sequence.score
                floats["baselines"][here] = sequence.baseline
                floats["rollout_logp"][here][response] = sequence.logprobs
                start += length
    split = (minibatches, capacity, rows, row_length)
    arrays: dict[str, Any] = {name: x.reshape(split) for name, x in {**ints, **floats, "mask": mask}.items()}
    arrays |= {"num_microbatches": num_microbatches, "num_sequences": np.int32(len(sequences))}
    return PackedBatch(**arrays)
