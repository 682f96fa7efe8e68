"""Two PPO steps of the real SmolLM2-135M-Instruct on real GSM8K rows, on the CPU."""

import json
import os
from pathlib import Path

import pytest

from tests.end_to_end.test_quickstart import ROOT, run

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
FLAGS = {
    "rollout.engine": "jax",
    "rollout.max-num-seqs": 4,
    "model.dtype": "float32",
    "data.train-files": GSM8K / "train.jsonl",
    "data.val-files": GSM8K / "test.jsonl",
    "data.train-batch-size": 4,
    "actor.ppo-mini-batch-size": 2,
    "data.max-prompt-length": 160,
    "data.max-response-length": 24,
    "actor.max-tokens-per-device": 368,
    "actor.row-length": 184,
    "data.train-max-samples": 64,
    "data.val-max-samples": 4,
    "trainer.total-training-steps": 2,
}


@pytest.mark.slow
@pytest.mark.skipif(
    "JAXPPO_SMOLLM2" not in os.environ, reason="JAXPPO_SMOLLM2 names no folder (.ci/smollm2 makes it, CI runs this)"
)
def test_two_real_steps(tmp_path):
    model = os.environ["JAXPPO_SMOLLM2"]
    flags = FLAGS | {"model.path": model, "trainer.output-dir": tmp_path}
    run("gsm8k_smollm2.py", *(word for name, value in flags.items() for word in (f"--{name}", str(value))))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    first, second = lines[1:]
    assert first["actor/reward_kl_penalty"] == 0
    assert second["actor/reward_kl_penalty"] != 0
    assert first["training/rollout_logp_diff_max"] < 1e-3
    assert second["training/rollout_logp_diff_max"] < 1e-3
    for line in (first, second):
        assert 0 < line["actor/entropy"] < 11
        assert line["actor/skipped_updates"] == line["critic/skipped_updates"] == 0
    # 24 tokens earn no reward and a fresh critic expects none: only from the second step on is there a KL to learn from
    assert second["actor/grad_norm"] > 0
    assert Path(tmp_path / "checkpoints" / "step_2").is_dir()
