import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxppo.step.packing import Rollout, assign_rows, pack, rows_bound


def rollout(prompt: list[int], response: list[int], score: float = 0.0, in_loss: bool = True) -> Rollout:
    logprobs = -0.1 * np.arange(1, len(response) + 1, dtype=np.float32)
    return Rollout(np.array(prompt, np.int32), np.array(response, np.int32), logprobs, score, in_loss)


def test_the_docstrings_example():
    batch = pack([rollout([7, 8], [5, 2], 1.0), rollout([9], [2], 0.0)], row_length=8, rows=1)
    assert batch.tokens.shape == (1, 2, 1, 8)  # two sequences of up to 8 tokens may need two rows
    assert batch.num_microbatches.tolist() == [1]
    assert batch.num_sequences == 2
    assert batch.tokens[0, 0, 0].tolist() == [7, 8, 5, 2, 9, 2, 0, 0]
    assert batch.segment_ids[0, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 0, 0]
    assert batch.positions[0, 0, 0].tolist() == [0, 1, 2, 3, 0, 1, 0, 0]
    assert batch.mask[0, 0, 0].tolist() == [False, False, True, True, False, True, False, False]
    assert batch.scores[0, 0, 0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    np.testing.assert_array_equal(batch.rollout_logp[0, 0, 0], np.float32([0, 0, -0.1, -0.2, 0, -0.1, 0, 0]))


def test_a_sequence_out_of_the_loss_keeps_its_tokens_but_no_mask():
    batch = pack([rollout([7], [5, 2], 1.0, in_loss=False)], row_length=4, rows=1)
    assert batch.tokens[0, 0, 0].tolist() == [7, 5, 2, 0]
    assert not batch.mask.any()
    assert batch.num_sequences == 1


def test_minibatches_take_sequences_in_order_and_share_one_shape():
    batch = pack([rollout([i], [i, i]) for i in range(1, 7)], row_length=6, rows=1, minibatches=3, longest=3)
    assert batch.tokens.shape == (3, 1, 1, 6)
    assert [sorted(set(batch.tokens[m].ravel()) - {0}) for m in range(3)] == [[1, 2], [3, 4], [5, 6]]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.data())
def test_every_token_is_placed_once_and_the_bound_on_rows_holds(data):
    row_length = data.draw(st.integers(4, 40))
    longest = data.draw(st.integers(2, row_length))
    lengths = data.draw(st.lists(st.integers(2, longest), min_size=1, max_size=60))
    rows = assign_rows(lengths, row_length)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= row_length for row in rows)
    assert len(rows) <= rows_bound(len(lengths), longest, row_length)


def test_a_row_takes_no_more_segments_than_a_kernel_can_tell_apart():
    rows = assign_rows([2] * 40, 1024)
    assert [len(row) for row in rows] == [16, 16, 8]
    assert len(rows) <= rows_bound(40, 2, 1024)


def test_the_shape_does_not_depend_on_the_lengths():
    short = pack([rollout([1], [2])] * 8, row_length=16, rows=2, minibatches=2, longest=10)
    long = pack([rollout([1] * 4, [2] * 6)] * 8, row_length=16, rows=2, minibatches=2, longest=10)
    assert short.tokens.shape == long.tokens.shape
    assert short.num_microbatches.tolist() == [1, 1]
    assert long.num_microbatches.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"row_length": 8, "rows": 1, "longest": 9}, "9 tokens do not fit rows of 8"),
        ({"row_length": 8, "rows": 1, "longest": 3}, "4 tokens is longer than 3"),
        ({"row_length": 8, "rows": 1, "minibatches": 2}, "1 sequences do not split into 2"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        pack([rollout([1, 2], [3, 4])], **arguments)


def test_a_rollout_with_one_log_probability_too_many_is_refused():
    with pytest.raises(ValueError, match="2 response tokens but 3"):
        Rollout(np.int32([1]), np.int32([5, 2]), np.float32([0, 0, 0]), 0.0)
    with pytest.raises(ValueError, match="at least one prompt token"):
        Rollout(np.int32([]), np.int32([5]), np.float32([0]), 0.0)
