"""On the real GSM8K where ../shared is beside the clone, as it is for every change before it lands."""

import importlib.util
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jaxppo.config import DataConfig, UserError
from jaxppo.data.prompts import load_prompts
from tests.data.test_chat import PLAIN, make

ROOT = Path(__file__).parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("prepare_gsm8k", ROOT / "scripts" / "prepare_gsm8k.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not GSM8K.is_dir() and "CI" not in os.environ, reason=f"GSM8K is not at {GSM8K}")
def test_the_real_data(script, tmp_path):
    script.main(script.Options(source=GSM8K, out=tmp_path))
    train, test = (pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    assert (len(train), len(test)) == (7473, 1319)
    assert test[0]["reward_model"] == {"style": "rule", "ground_truth": "18"}
    assert test[0]["extra_info"]["split"] == "test"
    assert test[0]["prompt"][0]["content"].endswith('output the final answer after "####".')
    assert all(row["reward_model"]["ground_truth"].lstrip("-").replace(".", "").isdigit() for row in train + test)
    config = DataConfig(max_prompt_length=2000)
    found = load_prompts((str(tmp_path / "test.parquet"),), config, make(PLAIN, False), -1)
    assert len(found.prompts) == 1319


def test_a_missing_file_is_named(script, tmp_path):
    with pytest.raises(UserError, match=r"--source: no file .*train.jsonl"):
        script.main(script.Options(source=tmp_path, out=tmp_path / "out"))
