"""What the package ships for its quickstart: a tokenizer, sums and a small model, as Hugging Face and verl lay them."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jaxppo.data.chat import decode, eos_ids, load_tokenizer, render
from jaxppo.rewards.functions import load_function
from tests.configs.test_configs import read

CONFIG = read("quickstart.py")
ROWS = {
    "train": pq.read_table(CONFIG.data.train_files[0]).to_pylist(),
    "test": pq.read_table(CONFIG.data.val_files[0]).to_pylist(),
}


def question(row: dict) -> str:
    return row["prompt"][0]["content"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(CONFIG.model.path)


def test_every_sum_of_two_digits_once_and_500_held_out():
    train, test = ({question(row) for row in ROWS[split]} for split in ("train", "test"))
    assert (len(ROWS["train"]), len(ROWS["test"])) == (7600, 500)
    assert train.isdisjoint(test)
    assert train | test == {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}


def test_the_ground_truth_is_the_sum():
    for row in ROWS["train"] + ROWS["test"]:
        a, b = question(row).removesuffix("=").split("+")
        assert row["reward_model"]["ground_truth"] == str(int(a) + int(b))
        assert row["data_source"] == "arithmetic"


def test_the_template_is_the_question_and_every_character_a_token(tokenizer):
    tokens = render(tokenizer, [{"role": "user", "content": "27+58="}])
    assert tokenizer.convert_ids_to_tokens(list(tokens)) == list("27+58=")
    assert len(tokens) == CONFIG.data.max_prompt_length
    (eos,) = eos_ids(Path(CONFIG.model.path), tokenizer)
    answer = [*tokenizer.convert_tokens_to_ids(list("85")), eos]
    assert eos not in tokens
    assert eos != tokenizer.pad_token_id
    assert decode(tokenizer, answer) == "85"


def test_the_right_answer_alone_scores():
    reward = load_function(CONFIG.reward.function)
    assert [reward("arithmetic", text, "85", {}) for text in ("85", "75", "", "185")] == [1.0, 0.0, 0.0, 0.0]


def test_the_model_is_small():
    assert (Path(CONFIG.model.path) / "model.safetensors").stat().st_size < 2**20
