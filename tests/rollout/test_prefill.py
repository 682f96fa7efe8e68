"""Prompts in groups of packed rows: what goes where, and that every prompt gets in."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxppo.rollout.prefill import GroupShape, pack_prompts


def test_two_prompts_in_one_row():
    shape = GroupShape(rows=1, row_length=4, entries=4, longest=2)
    packed = pack_prompts([[5, 6], [7]], 2, shape, 1)
    assert packed.count == 1
    assert packed.tokens.tolist() == [[[5, 6, 7, 0]]]
    assert packed.positions.tolist() == [[[0, 1, 0, 0]]]
    assert packed.segment_ids.tolist() == [[[1, 1, 2, 0]]]
    assert packed.sequences.tolist() == [[0, 1, 2, 3]]
    assert packed.starts.tolist() == [[0, 0, 2, 2]]


def test_a_prompt_that_does_not_fit_opens_a_row_and_then_a_group():
    shape = GroupShape(rows=2, row_length=3, entries=4, longest=3)
    packed = pack_prompts([[5, 6], [7, 8], [9], [4, 4]], 1, shape, 2)
    assert packed.tokens.tolist() == [[[5, 6, 9], [7, 8, 0]], [[4, 4, 0], [0, 0, 0]]]
    assert packed.sequences.tolist() == [[0, 1, 2, -1], [3, -1, -1, -1]]
    assert packed.starts.tolist() == [[0, 3, 2, 0], [0, 0, 0, 0]]


def test_more_samples_than_a_group_has_entries():
    packed = pack_prompts([[5], [6]], 3, GroupShape(rows=1, row_length=9, entries=2, longest=3), 4)
    assert packed.sequences.tolist() == [[0, 1], [2, -1], [3, 4], [5, -1]]
    assert packed.tokens[:, 0, 0].tolist() == [5, 5, 6, 6]


@pytest.mark.parametrize("row_length", [7, 40])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_sequence_starts_from_its_prompt_within_the_bound(row_length, data):
    longest = 7
    prompts = data.draw(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=longest), min_size=1, max_size=20))
    n, rows, entries = (data.draw(st.integers(1, most)) for most in (5, 3, 6))
    shape = GroupShape(rows=rows, row_length=row_length, entries=entries, longest=longest)
    packed = pack_prompts(prompts, n, shape, shape.groups_bound(len(prompts), n))
    assert packed.sequences[packed.sequences >= 0].tolist() == list(range(len(prompts) * n))
    for group, entry in zip(*np.nonzero(packed.sequences >= 0), strict=True):
        prompt = prompts[packed.sequences[group, entry] // n]
        start = packed.starts[group, entry]
        here = slice(start, start + len(prompt))
        assert packed.tokens[group].reshape(-1)[here].tolist() == prompt
        assert packed.positions[group].reshape(-1)[here].tolist() == list(range(len(prompt)))
        segment = packed.segment_ids[group].reshape(-1)[here]
        assert len(set(segment.tolist())) == 1
        assert (packed.segment_ids[group, start // row_length] == segment[0]).sum() == len(prompt)
