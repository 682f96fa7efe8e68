"""On the real GSM8K, in $JAXPPO_GSM8K or ../shared/data/gsm8k; elsewhere, but never in CI, on three rows like it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jaxppo.config import DataConfig, UserError
from jaxppo.data.prompts import load_prompts
from jaxppo.rewards.gsm8k import score
from tests.data.test_chat import PLAIN, make

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare_gsm8k.py"
SAMPLE = {
    "train": [
        {"question": "Ann has 2 pens and buys 3. How many?", "answer": "2+3=<<2+3=5>>5 pens.\n#### 5"},
        {
            "question": "A car costs $1,200 more than $34. How much?",
            "answer": "34+1200=<<34+1200=1234>>1234\n#### 1,234",
        },
    ],
    "test": [{"question": "It is 3 degrees and falls by 10. What now?", "answer": "3-10=<<3-10=-7>>-7\n#### -7"}],
}
ROWS = {"train": 7473, "test": 1319}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder with train.jsonl and test.jsonl, and how many rows they have."""
    given = os.environ.get("JAXPPO_GSM8K")
    folder = ROOT.parent / "shared" / "data" / "gsm8k" if given is None else Path(given)
    if folder.is_dir():
        return folder, ROWS
    if given is not None or os.environ.get("CI") == "true":
        pytest.fail(f"the real GSM8K is not at {folder}")
    folder = tmp_path_factory.mktemp("gsm8k")
    for split, rows in SAMPLE.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, {split: len(rows) for split, rows in SAMPLE.items()}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("prepare_gsm8k", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prepared(script, source, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "new" / "folder"
    script.main(script.Options(source=source[0], out=out))
    return out


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_row_in_verls_columns(prepared, source, split):
    folder, count = source
    raw = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = pq.read_table(prepared / f"{split}.parquet").to_pylist()
    assert len(rows) == len(raw) == count[split]
    for index, (row, before) in enumerate(zip(rows, raw, strict=True)):
        truth = row["reward_model"]["ground_truth"]
        assert row == {
            "data_source": "openai/gsm8k",
            "prompt": [
                {
                    "role": "user",
                    "content": before["question"]
                    + ' Let\'s think step by step and output the final answer after "####".',
                }
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": split, "index": index, **before},
        }
        assert before["answer"].replace(",", "").endswith(f"#### {truth}")
        assert truth.removeprefix("-").replace(".", "", 1).isdigit()
        for mode in ("robust", "verl"):
            assert score(before["answer"], truth, mode) == 1.0
            assert score(before["answer"], f"{truth}1", mode) == 0.0


def test_prepared_and_raw_rows_are_the_same_prompts(prepared, source):
    folder, count = source
    config = DataConfig(max_prompt_length=2000)
    found = [
        load_prompts((str(file),), config, make(PLAIN, False), -1)
        for file in (prepared / "test.parquet", folder / "test.jsonl")
    ]
    assert found[0] == found[1]
    assert len(found[0].prompts) == count["test"]


def test_a_missing_file_is_named(script, tmp_path):
    with pytest.raises(UserError, match=r"--source: .*train.jsonl: no such file$"):
        script.main(script.Options(source=tmp_path, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_row_of_something_else_is_named(script, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    with pytest.raises(UserError, match=r"train.jsonl, row 0: not a row of GSM8K"):
        script.main(script.Options(source=tmp_path, out=tmp_path / "out"))


def test_offline_without_a_source_is_one_line(tmp_path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: openai/gsm8k cannot be had from the hub (")
    assert len(done.stderr.splitlines()) == 1
