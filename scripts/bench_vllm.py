"""What sharing one GPU with vLLM costs and how far its log-probabilities are off. One GPU, one process.

    python scripts/bench_vllm.py MODEL_FOLDER PROMPTS_JSONL [--prompts 256] [--new-tokens 300] [--sleep-level 2]

Prints a JSON object a line: publish times (seconds), memory of the GPU in use (GiB) awake, asleep and awake again at
both sleep levels, tokens per second, and mean and max |difference| in nats between the log-probabilities of vLLM, of
the trainer's bf16 forward, and of the same forward in float32.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from jaxppo.config import Config, DataConfig, MeshConfig, ModelConfig, RolloutConfig
from jaxppo.parallel.platform import prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("prompts_file")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=300)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--sleep-level", type=int, default=0)
    args = parser.parse_args()
    config = Config(
        model=ModelConfig(path=args.folder),
        data=DataConfig(max_prompt_length=512, max_response_length=args.new_tokens),
        rollout=RolloutConfig(engine="vllm", sleep_level=args.sleep_level, enforce_eager=args.enforce_eager),
    )
    prepare(config)
    for name, figures in measure(config, args.prompts_file, args.prompts):
        print(json.dumps({name: figures}), flush=True)


def measure(config: Config, prompts_file: str, count: int) -> Iterator[tuple[str, Any]]:
    """Each figure as soon as it is known."""
    import jax
    import numpy as np

    from jaxppo import models
    from jaxppo.parallel.mesh import make_mesh
    from jaxppo.rollout.engine import Sampling
    from jaxppo.rollout.vllm_engine import start_vllm

    model = models.load(config.model.path, dtype="bfloat16")
    params = jax.block_until_ready(jax.device_put(model.params))
    start = time.perf_counter()
    engine = start_vllm(config, model.config, config.model.path, make_mesh(MeshConfig()))
    yield "start_s", time.perf_counter() - start
    yield "publish_bytes", 2 * sum(x.size for x in jax.tree.leaves(params))
    yield "publish_s", [timed(partial(engine.publish, params, version)) for version in range(30)]

    prompts = load_prompts(config.model.path, prompts_file, count)
    sampling = Sampling(temperature=1.0, max_new_tokens=config.data.max_response_length, eos_ids=eos(config.model.path))
    engine.generate(prompts[:8], dataclasses.replace(sampling, max_new_tokens=8), jax.random.key(1))
    start = time.perf_counter()
    completions = engine.generate(prompts, sampling, jax.random.key(0))
    yield "generate_tokens_per_s", sum(len(c.tokens) for c in completions) / (time.perf_counter() - start)
    if config.rollout.sleep_level:
        yield "memory_gib", sleeps(engine, params)
        again = engine.generate(prompts, sampling, jax.random.key(0))
        same = [np.array_equal(a.tokens, b.tokens) for a, b in zip(completions, again, strict=True)]
        yield "same_after_sleep", float(np.mean(same))
    yield "distances_nats", distances(config, model, params, prompts, completions)


def timed(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def load_prompts(folder: str, prompts_file: str, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in Path(prompts_file).read_text().splitlines()[:count]]
    suffix = ' Let\'s think step by step and output the final answer after "####".'
    chats = [[{"role": "user", "content": row["question"] + suffix}] for row in rows]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def eos(folder: str) -> tuple[int, ...]:
    ids = json.loads((Path(folder) / "config.json").read_text())["eos_token_id"]
    return tuple(ids) if isinstance(ids, list) else (ids,)


def distances(config: Config, model: Any, params: Any, prompts: list, completions: list) -> dict[str, Any]:
    import jax
    import numpy as np

    from jaxppo.models.logprobs import token_logprobs
    from jaxppo.step.packing import Rollout, pack
    from jaxppo.step.state import microbatch

    rollouts = [
        Rollout(np.asarray(p, np.int32), c.tokens, c.logprobs, 0.0) for p, c in zip(prompts, completions, strict=True)
    ]
    batch = pack(rollouts, config.row_length, 4)
    exact = dataclasses.replace(model, dtype=np.dtype("float32"), attention="xla")

    def score(model: Any) -> np.ndarray:
        function = jax.jit(lambda params, micro: token_logprobs(model, params, micro, 1.0)[0])
        return np.stack([function(params, microbatch(batch, 0, k)) for k in range(int(batch.num_microbatches[0]))])

    trainer = score(model)
    with jax.default_matmul_precision("highest"):
        reference = score(exact)
    mask = batch.mask[0, : len(trainer)]
    vllm = batch.rollout_logp[0, : len(trainer)]

    def gap(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
        d = np.abs(a - b)[mask]
        return {"mean": float(d.mean()), "p99": float(np.quantile(d, 0.99)), "max": float(d.max())}

    return {
        "tokens": {"count": int(mask.sum())},
        "vllm_to_trainer": gap(vllm, trainer),
        "vllm_to_float32": gap(vllm, reference),
        "trainer_to_float32": gap(trainer, reference),
    }


def sleeps(engine: Any, params: Any) -> dict[str, list[float]]:
    import torch  # pyright: ignore[reportMissingImports]

    def used() -> float:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return round((total - free) / 2**30, 2)

    figures = {"awake": [used()]}
    backend = engine._backend
    times = {"sleep 1": timed(lambda: backend.sleep(1))}
    figures["asleep, level 1"] = [used()]
    times["wake 1"] = timed(lambda: (backend.wake_up("weights"), backend.wake_up("kv_cache")))
    figures["awake again"] = [used()]
    times["sleep 2"] = timed(engine.sleep)
    figures["asleep, level 2"] = [used()]
    times["publish 2"] = timed(lambda: engine.publish(params, 1000))
    figures["weights awake"] = [used()]
    return figures | {"seconds": times}  # pyright: ignore[reportReturnType]


if __name__ == "__main__":
    main()
