"""Prompts packed for prefill, on the host: groups of prompts, each group one forward pass over packed rows.

A group is what enters free slots at once. A prompt's samples enter together where they fit, so that it is computed
once for all of them.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxppo.models.cudnn import max_segments


@dataclasses.dataclass(frozen=True)
class GroupShape:
    """What a group of prompts may hold. Any prompt of up to `longest` tokens fits an empty group."""

    rows: int
    row_length: int
    entries: int
    """Sequences, each of which takes a slot."""
    longest: int

    def groups_bound(self, prompts: int, n: int) -> int:
        """The most groups that n samples of each of that many prompts can take."""
        parts = -(-n // self.entries)
        in_rows = self.rows * min(self.row_length // self.longest, max_segments(self.row_length))
        return -(-prompts * parts // max(1, min(in_rows, self.entries // min(n, self.entries))))


@dataclasses.dataclass(frozen=True)
class PackedPrompts:
    """Groups of packed rows and the sequences that start from them.

    Example: prompts [5, 6] and [7], 2 samples each, one group of one row of 4 tokens: tokens 5 6 7 0, positions
    0 1 0 0, segment_ids 1 1 2 0, sequences 0 1 2 3 (prompt · n + sample), starts 0 0 2 2.
    """

    tokens: np.ndarray
    """[groups, rows, row_length] int32, as positions and segment_ids."""
    positions: np.ndarray
    segment_ids: np.ndarray
    sequences: np.ndarray
    """[groups, entries] int32; -1 where a group has fewer."""
    starts: np.ndarray
    """[groups, entries] int32: where the sequence's prompt begins in its group's rows, laid end to end."""
    count: int
    """Groups that are not empty."""


def pack_prompts(prompts: Sequence[Sequence[int]], n: int, shape: GroupShape, groups: int) -> PackedPrompts:
    """Prompts in their order, each into the first row of the newest group that has room, n samples of each."""
    rows = (groups, shape.rows, shape.row_length)
    packed = PackedPrompts(
        *(np.zeros(rows, np.int32) for _ in range(3)),
        sequences=np.full((groups, shape.entries), -1, np.int32),
        starts=np.zeros((groups, shape.entries), np.int32),
        count=0,
    )
    group, entries = -1, shape.entries
    used, segments = np.zeros(shape.rows, int), np.zeros(shape.rows, int)
    for prompt, tokens in enumerate(prompts):
        for first in range(0, n, shape.entries):
            samples = np.arange(first, min(first + shape.entries, n))
            free = (used + len(tokens) <= shape.row_length) & (segments < max_segments(shape.row_length))
            if entries + len(samples) > shape.entries or not free.any():
                group, entries, free = group + 1, 0, np.ones(shape.rows, bool)
                used[:], segments[:] = 0, 0
            row = int(np.argmax(free))
            here = slice(used[row], used[row] + len(tokens))
            segments[row] += 1
            packed.tokens[group, row, here] = tokens
            packed.positions[group, row, here] = np.arange(len(tokens))
            packed.segment_ids[group, row, here] = segments[row]
            slots = slice(entries, entries + len(samples))
            packed.sequences[group, slots] = prompt * n + samples
            packed.starts[group, slots] = row * shape.row_length + used[row]
            used[row] += len(tokens)
            entries += len(samples)
    return dataclasses.replace(packed, count=group + 1)
