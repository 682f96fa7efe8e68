"""A plan's bytes, FLOPs and collectives against XLA's own analysis and what the shapes say."""

import dataclasses
import json

import numpy as np
import pytest

from jaxppo.config import ActorConfig, AlgorithmConfig, Config, DataConfig, MeshConfig, ModelConfig, RolloutConfig
from jaxppo.models.parameters import count_params
from jaxppo.planning.counting import count
from jaxppo.planning.flops import expected_trips, forward_flops
from jaxppo.planning.plan import Plan, make_plan
from jaxppo.planning.program import Traced, trace
from jaxppo.planning.report import lines

NETWORK = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("network")
    (path / "config.json").write_text(json.dumps(NETWORK))
    return str(path)


def a_config(folder: str, *, remat="full", dtype="float32", **mesh: int) -> Config:
    """32 sequences of exactly 16 tokens in 2 minibatches: rows of 64 tokens are full."""
    return Config(
        model=ModelConfig(path=folder, remat=remat, dtype=dtype),
        data=DataConfig(train_batch_size=64, max_prompt_length=1, max_response_length=15),
        rollout=RolloutConfig(max_num_seqs=8),
        algorithm=AlgorithmConfig(use_kl_in_reward=True),
        actor=ActorConfig(ppo_mini_batch_size=32, max_tokens_per_device=64, row_length=64),
        mesh=MeshConfig(**({"fsdp": 1} | mesh)),
    )


@pytest.fixture(scope="module")
def split(folder) -> Traced:
    """Over fsdp alone, nothing recomputed."""
    return trace(a_config(folder, remat="none", fsdp=8))


def counts(programs: Traced, step: str = "update"):
    shards = programs.mesh.shape["data"] * programs.mesh.shape["fsdp"]
    trips = expected_trips(programs.config, programs.actor.config, programs.rows, shards, 16)
    return trips, count(getattr(programs, step).jaxpr, dict(programs.mesh.shape), trips)


def test_flops_are_those_of_the_formula(split):
    _, counted = counts(split)
    lengths = np.full(64, 16)
    architecture = split.actor.config
    want = 3 * sum(forward_flops(architecture, lengths, head=head) for head in (True, False)) / 8
    assert counted.flops == pytest.approx(want, rel=0.05)


def test_fsdp_gathers_what_the_parameters_weigh(split):
    trips, counted = counts(split)
    matrices = 3 * (4 * 128 * 512 * 3 // 4 + 128 * 128 * 3)  # the layers': mlp; q, k, v and o
    norms = 3 * 2 * 128 + 128
    layers = count_params(split.actor.config) - 2 * 64 * 128 - 128
    assert layers == matrices + norms - 128
    passes = trips.optimizer_steps * trips.microbatches
    head = 2 * 64 * 128  # once each way
    want = 4 * passes * (2 * 2 * layers + 2 * 128 + head) * 7 / 8
    gathered = counted.sent["all-gather", ("fsdp",)]
    assert gathered == pytest.approx(want, rel=0.05)
    assert {axes for _, axes in counted.sent} == {("fsdp",)}


@pytest.fixture(scope="module")
def plan(folder) -> Plan:
    """With recomputation, over two axes."""
    return make_plan(a_config(folder, fsdp=4, tensor=2), "h200", 1.0)


@pytest.mark.slow
def test_bytes_are_those_of_xla(plan):
    memory = plan.memory
    held = sum(memory.parameters.values()) - memory.parameters["reference"] + memory.optimizer + memory.batch
    assert held == pytest.approx(memory.update_arguments, rel=0.1)


@pytest.mark.slow
def test_report_says_what_fits_and_what_to_change(plan):
    assert any(line.startswith("fits: ") for line in lines(plan))
    too_much = dataclasses.replace(plan.memory, update_temporaries=int(500e9))
    text = "\n".join(lines(dataclasses.replace(plan, memory=too_much)))
    assert "update needs" in text
    assert "DOES NOT FIT" in text
