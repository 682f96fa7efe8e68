"""PPO with the real vLLM, 3 steps: it samples what the built-in engine would, of each step's weights."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxppo.models import Architecture, load
from jaxppo.models.parameters import count_params
from jaxppo.rollout.engine import Sampling
from jaxppo.rollout.jax_engine import JaxEngine
from jaxppo.rollout.vllm_engine import VLLMEngine
from jaxppo.run import trainer
from jaxppo.run.metrics import read_metrics
from tests.rollout.test_vllm_backend import ROLLOUT
from tests.run.world import change, make_world

pytestmark = pytest.mark.vllm

PROMPTS = [[5, 14, 6], [7, 14, 8], [9]]
GREEDY = Sampling(temperature=0.0, max_new_tokens=6, eos_ids=(2,))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = make_world(tmp_path_factory.mktemp("world"))
    folder = Path(config.model.path)
    described = json.loads((folder / "config.json").read_text())
    # vLLM's attention on CPUs needs heads of 32 at least
    described |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
    (folder / "config.json").write_text(json.dumps(described))
    config = change(config, "trainer", total_training_steps=3, save_freq=-1)
    return dataclasses.replace(config, rollout=dataclasses.replace(ROLLOUT, n=2))


def test_three_steps_with_the_engines_side_by_side(config, monkeypatch):
    """After every publish the greedy responses of both engines are equal, and they change from step to step."""
    architecture = Architecture.from_folder(config.model.path)
    builtin = JaxEngine(
        load(architecture, dtype="float32", attention="xla"), max_num_seqs=4, max_prompt_length=4, max_response_length=6
    )
    publish, seen = VLLMEngine.publish, []

    def publish_and_compare(self, params, version):
        published = publish(self, params, version)
        builtin.publish(params, version)
        theirs, ours = (e.generate(PROMPTS, GREEDY, jax.random.key(0)) for e in (self, builtin))
        for a, b in zip(ours, theirs, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-3)
            assert b.weights_version == version
        seen.append([c.tokens.tolist() for c in theirs])
        return published

    monkeypatch.setattr(VLLMEngine, "publish", publish_and_compare)
    state = trainer.train(config)
    assert int(state.step) == 3
    assert len(seen) == 4
    assert seen[0] != seen[3]
    lines = read_metrics(Path(config.trainer.output_dir) / "metrics.jsonl")
    steps = [line for line in lines if "training/rollout_logp_diff_mean" in line]
    assert len(steps) == 3
    for line in steps:
        assert line["training/rollout_logp_diff_max"] < 1e-3
        assert line["training/rollout_probs_diff_max"] < 1e-3
        assert "timing_s/publish" in line
        assert line["perf/publish_bytes"] == 4 * count_params(architecture)


def test_what_does_not_match_stops_the_run(config, monkeypatch, tmp_path):
    from jaxppo.rollout import vllm_engine
    from jaxppo.rollout.vllm_weights import WeightsError

    def renaming(*args):
        make = make_buckets(*args)
        return lambda params: (
            {tuple(n.replace("k_proj", "key") for n in names): x for names, x in bucket.items()}
            for bucket in make(params)
        )

    make_buckets = vllm_engine.make_buckets
    monkeypatch.setattr(vllm_engine, "make_buckets", renaming)
    with pytest.raises(WeightsError, match=r"layers\.0\.self_attn\.key"):
        trainer.train(change(config, "trainer", output_dir=str(tmp_path)))
