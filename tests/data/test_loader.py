import json

import pytest

from jaxppo.config import ConfigError
from jaxppo.data.loader import PromptLoader
from jaxppo.data.prompts import Prompt

PROMPTS = [Prompt(i, (3,), "", "", "", {}) for i in range(10)]


def loader(shuffle=True, seed=1):
    return PromptLoader(PROMPTS, 3, shuffle=shuffle, seed=seed)


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


def test_a_set_smaller_than_a_batch():
    with pytest.raises(ConfigError, match="data.train_batch_size = 11, but data.train_files have only 10 prompts"):
        PromptLoader(PROMPTS, 11, shuffle=True, seed=1)
