import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxppo.config import ConfigError
from jaxppo.data.loader import PromptLoader
from jaxppo.data.prompts import Prompt

PROMPTS = [Prompt(i, (3,), "", "", "", {}) for i in range(20)]


def loader(shuffle=True, seed=1):
    return PromptLoader(PROMPTS[:10], 3, shuffle=shuffle, seed=seed)


def indices(batch):
    return [p.index for p in batch]


def test_every_epoch_has_its_own_order_and_drops_its_last_partial_batch():
    batches = loader()
    epochs = [[i for _ in range(3) for i in indices(next(batches))] for _ in range(4)]
    assert batches.steps_per_epoch == 3
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert indices(next(loader())) == epochs[0][:3]
    assert indices(next(loader(seed=2))) != epochs[0][:3]


def test_without_shuffling_the_files_order_stands():
    batches = loader(shuffle=False)
    assert [indices(next(batches)) for _ in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2]]


ORDER_OF_SEED_1 = [[5, 7, 6], [0, 4, 8], [9, 2, 1], [8, 4, 1]]


@pytest.mark.parametrize("cut", [1, 3, 4, 6])
def test_a_cut_anywhere_goes_on_with_the_same_batches(cut):
    whole = loader()
    expected = [indices(next(whole)) for _ in range(10)]
    first = loader()
    for _ in range(cut):
        next(first)
    again = loader()
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert again.epoch == cut // 3
    assert [indices(next(again)) for _ in range(10 - cut)] == expected[cut:]


def test_the_order_is_the_same_in_every_process_and_release():
    batches = loader()
    assert [indices(next(batches)) for _ in range(4)] == ORDER_OF_SEED_1


def test_a_run_may_be_cut_twice():
    whole = loader()
    expected = [indices(next(whole)) for _ in range(8)]
    state, found = loader().state_dict(), []
    for steps in (3, 2, 3):  # the first cut is exactly an epoch's end
        part = loader()
        part.load_state_dict(json.loads(json.dumps(state)))
        found += [indices(next(part)) for _ in range(steps)]
        state = part.state_dict()
    assert found == expected


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(1, 20), st.data(), st.integers(0, 2**32 - 1))
def test_an_epoch_draws_each_prompt_at_most_once(count, data, seed):
    size = data.draw(st.integers(1, count))
    batches = PromptLoader(PROMPTS[:count], size, shuffle=True, seed=seed)
    for epoch in range(2):
        assert batches.epoch == epoch
        drawn = [i for _ in range(batches.steps_per_epoch) for i in indices(next(batches))]
        assert len(drawn) == len(set(drawn)) == count // size * size
    assert batches.epoch == 2


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_does_not_fit(seed):
    with pytest.raises(ConfigError, match=f"data.seed = {seed}: valid are 0 to 4294967295"):
        loader(seed=seed)


def test_a_set_smaller_than_a_batch():
    with pytest.raises(ConfigError, match="data.train_batch_size = 11, but data.train_files have only 10 prompts"):
        PromptLoader(PROMPTS[:10], 11, shuffle=True, seed=1)
