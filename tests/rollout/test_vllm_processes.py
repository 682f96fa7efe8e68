"""Two processes, parameters split over both: an engine each (data-parallel), or one engine over both (tensor-parallel).

Everyone gets all answers, and their log-probabilities are those of the whole model.
"""

import json
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.models import Architecture, init_params, load
from jaxppo.models.logprobs import token_logprobs
from jaxppo.step.packing import Rollout, pack
from jaxppo.step.state import microbatch
from tests.rollout.test_vllm_backend import ARCHITECTURE

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [[5, 6, 7], [8], [9, 10]]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_processes_roll_out_as_one(tensor_parallel, tmp_path):
    config = ARCHITECTURE | {"initializer_range": 0.2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "tests.rollout.vllm_process"]
    processes = [
        subprocess.Popen(
            [*command, str(r), str(port), str(tensor_parallel), str(tmp_path), str(tmp_path / f"{r}.json")]
        )
        for r in range(2)
    ]
    assert [p.wait(timeout=500) for p in processes] == [0, 0]
    first, second = (json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2))
    assert first == second
    assert [row[3] for row in first] == [0] * 9 + [1] * 9
    prompts = 2 * (PROMPTS + [p for p in PROMPTS for _ in range(2)])
    model = load(Architecture.from_dict(config), dtype="float32", attention="xla")
    for version in range(2):
        rollouts = [
            Rollout(np.array(p, np.int32), np.array(row[0], np.int32), np.array(row[1], np.float32), 0.0)
            for p, row in zip(prompts, first, strict=True)
            if row[3] == version
        ]
        batch = jax.tree.map(jnp.asarray, microbatch(pack(rollouts, 8, len(rollouts)), 0, 0))
        params = init_params(model.config, jax.random.key(version), jnp.float32)
        logp, _ = token_logprobs(model, params, batch, 1.0)
        np.testing.assert_allclose(logp[batch.mask], batch.rollout_logp[batch.mask], atol=1e-3)
