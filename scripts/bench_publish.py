"""Seconds from the trainer's arrays to an engine that samples from them, beside the chip's own copy rate.

usage: python scripts/bench_publish.py [--shapes 135m 1.5b] [--repeats 20] [--enforce-eager True]

Random weights, float32 masters: what is timed is the cast to bfloat16, the hand-over, vLLM's copy into its own layout
and the read-back of a few tensors. `engine bytes` are those of the engine's bfloat16 weights. One GPU, one process.
"""

import dataclasses
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import tyro
from bench_update import Shape, copy_rate, hugging_face_config

from jaxppo.config import Config, DataConfig, MeshConfig, ModelConfig, RolloutConfig
from jaxppo.parallel.platform import prepare


@dataclasses.dataclass(frozen=True)
class Options:
    shapes: tuple[Shape, ...] = ("135m",)
    repeats: int = 20
    enforce_eager: bool = True
    """What a publish costs does not depend on it, how long vLLM takes to start does."""


def main(options: Options) -> None:
    config = Config(
        data=DataConfig(max_prompt_length=256, max_response_length=300),
        rollout=RolloutConfig(engine="vllm", gpu_memory_utilization=0.3, enforce_eager=options.enforce_eager),
    )
    prepare(config)
    import jax

    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, copy {copy_rate() / 1e12:.2f} TB/s (read + write)")
    print("shape  engine bytes  median ms  fastest ms  GB/s at the median")
    for shape in options.shapes:
        seconds, size = publish_seconds(config, shape, options.repeats)
        middle = float(np.median(seconds))
        print(f"{shape:5s}  {size:12,d}  {1e3 * middle:9.2f}  {1e3 * min(seconds):10.2f}  {size / middle / 1e9:18.0f}")


def publish_seconds(config: Config, shape: Shape, repeats: int) -> tuple[list[float], int]:
    """(seconds of each publish but the first, bytes of the engine's weights)."""
    import jax

    from jaxppo import models
    from jaxppo.parallel.mesh import make_mesh
    from jaxppo.rollout.vllm_engine import start_vllm

    architecture = models.Architecture.from_dict(hugging_face_config(shape))
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), shape)
        named = dataclasses.replace(config, model=ModelConfig(path=folder))
        params = jax.block_until_ready(jax.jit(models.init_params, static_argnums=0)(architecture, jax.random.key(0)))
        engine = start_vllm(named, architecture, folder, make_mesh(MeshConfig()))
    seconds = []
    for version in range(repeats + 1):
        start = time.perf_counter()
        engine.publish(params, version)
        seconds.append(time.perf_counter() - start)
    return seconds[1:], 2 * sum(x.size for x in jax.tree.leaves(params))


def write_folder(folder: Path, shape: Shape) -> None:
    """A model's config.json, all that vLLM needs where weights are published and tokens are ids."""
    raw = hugging_face_config(shape)
    family = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[raw["model_type"]]
    more = {"architectures": [family], "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(raw | more))


if __name__ == "__main__":
    main(tyro.cli(Options))
