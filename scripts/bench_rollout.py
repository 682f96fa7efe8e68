"""Tokens per second of an engine, temperature 1 with log-probabilities, for real model shapes.

usage: python scripts/bench_rollout.py [--engine jax] [--shape 135m] [--prompts 1319] [--new-tokens 300] [--slots 1319]

Prompts of GSM8K's lengths, random weights and no end-of-sequence token: every response has exactly `new_tokens`
tokens. The first call compiles and is not counted. `--engine vllm` is the peer, on the same prompts and weights.
"""

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from bench_publish import write_folder
from bench_update import Shape, hugging_face_config

from jaxppo.config import Config, DataConfig, MeshConfig, ModelConfig, RolloutConfig
from jaxppo.parallel.platform import prepare
from jaxppo.rollout.engine import Engine, Sampling


@dataclasses.dataclass(frozen=True)
class Options:
    engine: Literal["jax", "vllm"] = "jax"
    shape: Shape = "135m"
    prompts: int = 1319
    new_tokens: int = 300
    slots: tuple[int, ...] = (1319,)
    """Sequences that decode at a time."""
    repeats: int = 2


def main(options: Options) -> None:
    for slots in options.slots:
        rollout = RolloutConfig(engine=options.engine, max_num_seqs=slots)
        config = Config(rollout=rollout, data=DataConfig(max_prompt_length=256, max_response_length=options.new_tokens))
        prepare(config)
        import jax

        print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.engine}, {options.shape}", flush=True)
        engine = start(config, options.shape)
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.normal(105, 30, options.prompts), 40, 256).astype(int)
        vocabulary = hugging_face_config(options.shape)["vocab_size"]
        prompts = [rng.integers(3, vocabulary, n).tolist() for n in lengths]
        sampling = Sampling(temperature=1.0, max_new_tokens=options.new_tokens, eos_ids=())
        for i in range(options.repeats + 1):
            begin = time.perf_counter()
            completions = engine.generate(prompts, sampling, jax.random.key(i))
            seconds = time.perf_counter() - begin
            tokens = sum(len(c.tokens) for c in completions)
            label = "first call" if i == 0 else f"{tokens / seconds:,.0f} tok/s"
            print(f"slots {slots}: {tokens} tokens in {seconds:.2f} s  {label}", flush=True)


def start(config: Config, shape: Shape) -> Engine:
    """The engine with random weights published to it."""
    import jax

    from jaxppo import models
    from jaxppo.parallel.mesh import make_mesh
    from jaxppo.rollout.jax_engine import JaxEngine
    from jaxppo.rollout.vllm_engine import start_vllm

    architecture = models.Architecture.from_dict(hugging_face_config(shape))
    model = models.load(architecture, jax.random.key(0), dtype="bfloat16", param_dtype="bfloat16")
    if config.rollout.engine == "vllm":
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), shape)
            named = dataclasses.replace(config, model=ModelConfig(path=folder))
            engine: Engine = start_vllm(named, architecture, folder, make_mesh(MeshConfig()))
    else:
        engine = JaxEngine(
            model,
            max_num_seqs=config.rollout.max_num_seqs,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
        )
    engine.publish(model.params, 0)
    return engine


if __name__ == "__main__":
    main(tyro.cli(Options))
