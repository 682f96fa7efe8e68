"""One of two processes that roll out together: vllm_process RANK PORT TENSOR_PARALLEL FOLDER OUT.

Parameters are split over both processes' devices; what comes out must not show it.
"""

import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

from jaxppo.config import Config, DataConfig, MeshConfig, ModelConfig, RolloutConfig
from jaxppo.parallel.platform import prepare


def main(rank: int, port: str, tensor_parallel: int, folder: str, out: str) -> None:
    config = Config(
        model=ModelConfig(dtype="float32"),
        data=DataConfig(max_prompt_length=16, max_response_length=16),
        rollout=RolloutConfig(
            engine="vllm",
            max_num_seqs=8,
            max_num_batched_tokens=64,
            enforce_eager=True,
            tensor_parallel_size=tensor_parallel,
            gpu_memory_utilization=0.2,
        ),
    )
    prepare(config)
    import jax

    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    from jaxppo.models import Architecture, abstract_params, init_params, parameter_axes
    from jaxppo.parallel.mesh import make_mesh, parameter_shardings
    from jaxppo.rollout.engine import Sampling
    from jaxppo.rollout.vllm_engine import start_vllm

    mesh = make_mesh(MeshConfig())
    architecture = Architecture.from_folder(folder)
    shardings = parameter_shardings(mesh, parameter_axes(architecture), abstract_params(architecture))
    engine = start_vllm(config, architecture, folder, mesh)
    answers = []
    for version in range(2):
        make = jax.jit(lambda key: init_params(architecture, key), out_shardings=shardings)
        engine.publish(make(jax.random.key(version)), version)
        greedy = Sampling(temperature=0.0, max_new_tokens=5, eos_ids=(2,))
        drawn = Sampling(temperature=1.0, max_new_tokens=5, eos_ids=(2,), n=2)
        for sampling in (greedy, drawn):
            answers += engine.generate([[5, 6, 7], [8], [9, 10]], sampling, jax.random.key(7))
    rows = [[c.tokens.tolist(), c.logprobs.tolist(), c.finish_reason, c.weights_version] for c in answers]
    Path(out).write_text(json.dumps(rows))
    jax.distributed.shutdown()


if __name__ == "__main__":
    rank, port, tensor_parallel, folder, out = sys.argv[1:]
    main(int(rank), port, int(tensor_parallel), folder, out)
