"""Tokens per second of the built-in engine, temperature 1 with log-probabilities, for real model shapes.

usage: python scripts/bench_rollout.py [--shape 135m] [--prompts 1319] [--new-tokens 300] [--slots 1024]

Random weights and no end-of-sequence token: every response has exactly `new_tokens` tokens. The first call compiles
and is not counted.
"""

import dataclasses
import time

import jax
import numpy as np
import tyro
from bench_update import Shape, hugging_face_config

from jaxppo.models import Architecture, load
from jaxppo.rollout.engine import Sampling
from jaxppo.rollout.jax_engine import JaxEngine


@dataclasses.dataclass(frozen=True)
class Options:
    shape: Shape = "135m"
    prompts: int = 1319
    new_tokens: int = 300
    slots: tuple[int, ...] = (512, 1319)
    """Sequences that decode at a time."""
    repeats: int = 2


def main(options: Options) -> None:
    architecture = Architecture.from_dict(hugging_face_config(options.shape))
    model = load(architecture, jax.random.key(0), dtype="bfloat16", param_dtype="bfloat16")
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.normal(105, 30, options.prompts), 40, 256).astype(int)
    prompts = [rng.integers(3, architecture.vocab_size, n).tolist() for n in lengths]
    sampling = Sampling(temperature=1.0, max_new_tokens=options.new_tokens, eos_ids=(-1,))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.shape}, {options.prompts} prompts")
    for slots in options.slots:
        engine = JaxEngine(model, max_num_seqs=slots, max_prompt_length=256, max_response_length=options.new_tokens)
        engine.publish(model.params, 0)
        for i in range(options.repeats + 1):
            start = time.perf_counter()
            completions = engine.generate(prompts, sampling, jax.random.key(i))
            seconds = time.perf_counter() - start
            tokens = sum(len(c.tokens) for c in completions)
            label = "compiles" if i == 0 else f"{tokens / seconds:,.0f} tok/s"
            print(f"slots {slots}: {tokens} tokens in {seconds:.2f} s  {label}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
