import dataclasses
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxppo.config import DataConfig, UserError
from jaxppo.data.prompts import load_prompts
from tests.data.test_chat import PLAIN, make

CONFIG = DataConfig(max_prompt_length=4)


def row(prompt, **change):
    base = {"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": "1"}, "extra_info": {"index": 0}}
    return base | change


@pytest.fixture
def load(tmp_path):
    def from_rows(rows, config=CONFIG, suffix=".jsonl", max_samples=-1, **settings):
        file = tmp_path / f"train{suffix}"
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        else:
            file.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return load_prompts((str(file),), config, make(PLAIN, False), max_samples, **settings)

    return from_rows


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_verl_row(load, suffix):
    (prompt,) = load([row([{"role": "user", "content": "abc"}])], suffix=suffix).prompts
    assert prompt.tokens == (4, 5, 6)
    assert prompt.text == "abc"
    assert (prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("s", "1", {"index": 0})


def test_a_raw_gsm8k_row(load):
    config = dataclasses.replace(CONFIG, max_prompt_length=200)
    (prompt,) = load([{"question": "ab?", "answer": "<<1+1=2>> so\n#### 1,234"}], config).prompts
    assert prompt.data_source == "openai/gsm8k"
    assert prompt.ground_truth == "1234"
    assert prompt.text == 'ab? Let\'s think step by step and output the final answer after "####".'


def test_a_question_column_that_is_the_prompt_is_taken_as_it_is(load):
    config = dataclasses.replace(CONFIG, prompt_key="question")
    (prompt,) = load([{"question": "ab", "answer": "x"}], config).prompts
    assert (prompt.text, prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("ab", "unknown", None, {})


def test_a_template_that_refuses_a_prompt_is_told_with_the_row(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(row([{"role": "system", "content": "a"}])) + "\n")
    tokenizer = make("{{ raise_exception('System role not supported') }}", False)
    with pytest.raises(UserError, match=r"train.jsonl, row 0: the tokenizer's chat template refuses .*System role not"):
        load_prompts((str(file),), CONFIG, tokenizer, -1)


def test_rows_are_numbered_in_each_file_and_indexed_over_all(tmp_path):
    files = tuple(str(tmp_path / f"{name}.jsonl") for name in "ab")
    for file, prompts in zip(files, (["a", "b"], ["c", "abcde"]), strict=True):
        with open(file, "w") as out:
            out.writelines(json.dumps(row(p)) + "\n" for p in prompts)
    config = dataclasses.replace(CONFIG, filter_overlong_prompts=True)
    assert [p.index for p in load_prompts(files, config, make(PLAIN, False), -1).prompts] == [0, 1, 2]
    with pytest.raises(UserError, match=r"data.train_files: .*b.jsonl, row 1: the prompt has 5 tokens"):
        load_prompts(files, CONFIG, make(PLAIN, False), -1)


@pytest.mark.parametrize(
    ("truncation", "tokens"), [("left", (5, 6, 7, 8)), ("right", (4, 5, 6, 7)), ("middle", (4, 5, 7, 8))]
)
def test_truncation_acts_on_the_ids(load, truncation, tokens):
    rows = [row("abc"), row("abcd"), row("abcde")]
    found = load(rows, dataclasses.replace(CONFIG, truncation=truncation))
    assert [p.tokens for p in found.prompts] == [(4, 5, 6), (4, 5, 6, 7), tokens]
    assert (found.dropped, found.truncated) == (0, 1)


def test_filtering_counts(load):
    config = dataclasses.replace(CONFIG, filter_overlong_prompts=True)
    found = load([row("abc"), row("abcde"), row("abcd")], config)
    assert [p.index for p in found.prompts] == [0, 2]
    assert found.dropped == 1
    with pytest.raises(UserError, match=r"no prompt is left \(1 longer than .* = 4 were dropped, of 1 rows\)"):
        load([row("abcde")], config)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(row("ab")) + "\n", encoding="utf-8-sig")
    assert load_prompts((str(file),), CONFIG, make(PLAIN, False), -1).prompts[0].tokens == (4, 5)


def test_only_the_first_rows(load):
    assert len(load([row("a")] * 5, max_samples=3).prompts) == 3


def test_the_fingerprint_changes_with_tokens_truths_and_order(load):
    rows = [row("ab"), row("cd")]
    prints = {
        load(rows).fingerprint,
        load(rows[::-1]).fingerprint,
        load([row("ab"), row("ce")]).fingerprint,
        load([rows[0], row("cd", reward_model={"ground_truth": "2"})]).fingerprint,
    }
    assert len(prints) == 4
    assert load(rows).fingerprint == load(rows).fingerprint


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("abcde")], r"row 0: the prompt has 5 tokens, data.max_prompt_length = 4: raise it, set data.filter_"),
        ([row("a"), row("")], "row 1: the prompt is empty"),
        ([row("a"), row(None)], "row 1: the prompt is empty"),
        ([row([{"role": "user"}])], "row 0: the prompt is neither a string nor a list of messages"),
        ([row([{"role": "user", "content": None}])], "row 0: the prompt is neither a string nor a list of messages"),
        ([row("a", reward_model="1")], "row 0: reward_model is a str, valid is a dict"),
        ([row("a", extra_info=[1])], "row 0: extra_info is a list, valid is a dict"),
        ([{"question": "a", "answer": "42"}], "row 0: not a row of GSM8K: it needs a question and an answer that ends"),
        ([{"question": "a", "answer": 42}], "row 0: not a row of GSM8K"),
        ([{"question": "a"}], "no column data.prompt_key = 'prompt'; the columns are question"),
    ],
)
def test_a_bad_row_is_named(load, rows, message):
    with pytest.raises(UserError, match=message):
        load(rows)


def test_a_bad_file_is_named(tmp_path):
    def load(file):
        load_prompts((str(file),), CONFIG, make(PLAIN, False), -1, "data.val_files")

    (tmp_path / "test.jsonl").write_text("{broken\n")
    with pytest.raises(UserError, match=r"data.val_files: .*tets.jsonl: no such file \(did you mean .*test.jsonl\?\)"):
        load(tmp_path / "tets.jsonl")
    with pytest.raises(UserError, match="line 1: not JSON"):
        load(tmp_path / "test.jsonl")
    (tmp_path / "test.jsonl").write_bytes('{"prompt": "a"}\n{"prompt": "é"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match="line 2: not JSON"):
        load(tmp_path / "test.jsonl")
    (tmp_path / "test.parquet").write_text("no parquet")
    with pytest.raises(UserError, match="not a parquet file"):
        load(tmp_path / "test.parquet")
    (tmp_path / "test.csv").write_text("a")
    with pytest.raises(UserError, match="valid are .parquet and .jsonl files"):
        load(tmp_path / "test.csv")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("lacking", [None, {"ground_truth": None}])
def test_a_row_without_a_ground_truth_is_named_where_the_reward_needs_it(load, suffix, lacking):
    rows = [row("a"), row("b", reward_model=lacking)]
    with pytest.raises(UserError, match=rf"train{suffix}, row 1: no reward_model.ground_truth, which reward.function "):
        load(rows, suffix=suffix, needs_truth=True)
    assert [prompt.ground_truth for prompt in load(rows, suffix=suffix).prompts] == ["1", None]


def test_half_a_surrogate_pair_is_told_with_the_row(load):
    with pytest.raises(UserError, match=r"row 1: the prompt is no valid Unicode"):
        load([row("a"), row("b\ud800")])
