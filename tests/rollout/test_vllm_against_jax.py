"""Both engines say the same, in float32, of the same weights, and both change when the weights do."""

import json

import jax
import numpy as np
import pytest

from jaxppo.config import Config, DataConfig, MeshConfig, ModelConfig, RolloutConfig
from jaxppo.models import Architecture, init_params, load
from jaxppo.parallel.mesh import make_mesh
from jaxppo.parallel.platform import prepare
from jaxppo.rollout.engine import Sampling
from jaxppo.rollout.jax_engine import JaxEngine
from jaxppo.rollout.vllm_engine import start_vllm
from tests.rollout.test_vllm_backend import ARCHITECTURE

pytestmark = pytest.mark.vllm

PROMPTS = [[5, 6, 7], [8], [9, 10], [3] * 16, [11, 5, 6, 7]]
SIZES = {"max_prompt_length": 16, "max_response_length": 12}


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_responses_are_equal_token_for_token(tied, tmp_path):
    config = Config(
        model=ModelConfig(dtype="float32"),
        data=DataConfig(**SIZES),
        rollout=RolloutConfig(engine="vllm", max_num_seqs=4, enforce_eager=True, gpu_memory_utilization=0.2),
    )
    prepare(config)
    described = ARCHITECTURE | {"initializer_range": 0.2, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(described))
    model = load(Architecture.from_dict(described), dtype="float32", attention="xla")
    builtin = JaxEngine(model, max_num_seqs=4, **SIZES)
    vllm = start_vllm(config, model.config, str(tmp_path), make_mesh(MeshConfig()))
    sampling = Sampling(temperature=0.0, max_new_tokens=12, eos_ids=(2, 40))
    responses = []
    for version in range(2):
        params = init_params(model.config, jax.random.key(version))
        builtin.publish(params, version)
        vllm.publish(params, version)
        ours = builtin.generate(PROMPTS, sampling, jax.random.key(0))
        theirs = vllm.generate(PROMPTS, sampling, jax.random.key(0))
        for a, b in zip(ours, theirs, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-3)
            assert (a.finish_reason, a.weights_version) == (b.finish_reason, b.weights_version)
        responses.append([c.tokens.tolist() for c in theirs])
    assert responses[0] != responses[1]
