"""Times the PPO update and the scoring pass of real model shapes on packed rows, beside the chip's own ceilings.

usage: python scripts/bench_update.py --shapes 1.5b 0.5b [--attention cudnn_packed] [--remat dots full]

Model FLOPs are counted as a text book would: 6 per parameter in a product and token, the (tied) head once, causal
attention halved, segment by segment; nothing for recomputation. The critic has no vocabulary. `valid` counts the
tokens of sequences alone, `padded` all of the rows that were computed.
"""

import dataclasses
import gc
import time
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jaxppo.config import ActorConfig, AlgorithmConfig, Config, DataConfig, MeshConfig, TrainerConfig
from jaxppo.models import Architecture, init_params, load
from jaxppo.models.heads import init_value_head
from jaxppo.parallel.collectives import collectives
from jaxppo.parallel.mesh import constrain_fn, make_mesh, place_rows
from jaxppo.planning.flops import model_flops
from jaxppo.run.programs import rows_per_microbatch
from jaxppo.step.init import init_state, state_shardings
from jaxppo.step.packing import Rollout, pack
from jaxppo.step.score import make_score_step
from jaxppo.step.update import make_update_step

Shape = Literal["135m", "0.5b", "1.5b", "7b", "tiny"]
SIZES: dict[Shape, tuple[int, int, int, int, int, int, bool]] = {
    # hidden, mlp, layers, heads, kv heads, vocabulary, tied
    "135m": (576, 1536, 30, 9, 3, 49152, True),
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "tiny": (64, 128, 2, 4, 2, 128, True),
}


@dataclasses.dataclass(frozen=True)
class Options:
    shapes: tuple[Shape, ...] = ("0.5b", "1.5b")
    attention: Literal["auto", "cudnn_packed", "xla"] = "auto"
    remat: tuple[Literal["none", "dots", "full"], ...] = ("full",)
    row_length: int = 4096
    tokens: tuple[int, ...] = (16384,)
    """Of one microbatch."""
    sequences: int = 256
    """In one step of one minibatch."""
    repeats: int = 3


def main(options: Options) -> None:
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    matmul = matmul_rate()
    print(f"ceilings: {matmul / 1e12:.0f} TFLOP/s bf16 8192^3, {copy_rate() / 1e12:.2f} TB/s copy (read + write)")
    print("shape  remat  microbatch  score ms  update ms  tok/s valid  TFLOP/s valid  of matmul  TFLOP/s padded")
    for shape in options.shapes:
        for remat in options.remat:
            for tokens in options.tokens:
                try:
                    bench(shape, remat, tokens, options, matmul)
                except jax.errors.JaxRuntimeError as error:
                    print(f"{shape}  {remat}  {tokens}  {str(error).splitlines()[0][:150]}", flush=True)
                gc.collect()


def bench(shape: Shape, remat: Any, tokens: int, options: Options, matmul: float) -> None:
    config = Config(
        data=DataConfig(train_batch_size=options.sequences, max_prompt_length=256, max_response_length=512),
        algorithm=AlgorithmConfig(use_kl_in_reward=True),
        actor=ActorConfig(
            ppo_mini_batch_size=options.sequences, max_tokens_per_device=tokens, row_length=options.row_length
        ),
        trainer=TrainerConfig(total_training_steps=1),
    )
    architecture = Architecture.from_dict(hugging_face_config(shape))
    mesh = make_mesh(MeshConfig())
    model = load(
        architecture, remat=remat, attention=options.attention, constrain=constrain_fn(mesh), mesh=collectives(mesh)
    )
    shardings = state_shardings(config, model, model, mesh)

    @partial(jax.jit, out_shardings=shardings)
    def first_state() -> Any:
        key = jax.random.key(0)
        critic = {**init_params(architecture, key), "value_head": init_value_head(architecture)}
        return init_state(config, init_params(architecture, key), critic, key)

    state = first_state()
    rollouts = gsm8k_like(options.sequences, architecture.vocab_size)
    rows = rows_per_microbatch(config, mesh)
    packed = pack(rollouts, config.row_length, rows, longest=config.max_sequence_length)
    batch = place_rows(packed, mesh)
    score, update = make_score_step(config, model, mesh), make_update_step(config, model, mesh)
    score_seconds, update_seconds = [], []
    for _ in range(options.repeats + 1):
        start = time.perf_counter()
        experience = jax.block_until_ready(score(state, None, batch))
        middle = time.perf_counter()
        state, metrics = update(state, experience)
        jax.block_until_ready((state, metrics))
        score_seconds.append(middle - start)
        update_seconds.append(time.perf_counter() - middle)
    valid = np.array([len(r) for r in rollouts])
    padded = int(packed.num_microbatches.sum()) * rows * config.row_length
    flops = model_flops(architecture, valid)
    seconds = float(np.median(update_seconds[1:]))
    print(
        f"{shape:5s}  {remat:5s}  {tokens:10d}  {1e3 * np.median(score_seconds[1:]):8.0f}  {1e3 * seconds:9.0f}  "
        f"{valid.sum() / seconds:11,.0f}  {flops / seconds / 1e12:13.0f}  {flops / seconds / matmul:9.2f}  "
        f"{flops / seconds / 1e12 * padded / valid.sum():14.0f}   (peak {peak_gigabytes():.0f} GB)",
        flush=True,
    )


def hugging_face_config(shape: Shape) -> dict[str, Any]:
    hidden, mlp, layers, heads, kv_heads, vocabulary, tied = SIZES[shape]
    return {
        "model_type": "llama" if shape in ("135m", "tiny") else "qwen2",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
    }


def gsm8k_like(n: int, vocab: int) -> list[Rollout]:
    """Prompts of about 100 and responses of about 270 tokens, as SmolLM2's and Qwen's on GSM8K."""
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.normal(105, 30, n), 40, 256).astype(int)
    responses = np.clip(rng.lognormal(5.5, 0.4, n), 40, 512).astype(int)
    return [
        Rollout(
            rng.integers(3, vocab, p).astype(np.int32),
            rng.integers(3, vocab, r).astype(np.int32),
            np.full(r, -11.0, np.float32),
            float(rng.integers(0, 2)),
        )
        for p, r in zip(prompts, responses, strict=True)
    ]


def matmul_rate(n: int = 8192) -> float:
    """FLOP/s of an 8192 x 8192 x 8192 product of random bfloat16 matrices."""
    a, b = (jax.random.normal(k, (n, n), jnp.bfloat16) for k in jax.random.split(jax.random.key(0)))
    return 2 * n**3 / _seconds(jax.jit(jnp.matmul), a, b)


def copy_rate() -> float:
    """Bytes read and written per second by a large copy."""
    x = jnp.zeros(1 << 30 if jax.default_backend() == "gpu" else 1 << 24, jnp.float32)
    return 2 * x.nbytes / _seconds(jax.jit(lambda x: x + 1), x)


def _seconds(function: Any, *arguments: Any) -> float:
    """Of one run: 20 in a row, so that no launch is waited for; the median of five such rows."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(20):
            out = function(*arguments)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / 20)
    return float(np.median(times))


def peak_gigabytes() -> float:
    stats = jax.devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] / 1e9 if stats else float("nan")


if __name__ == "__main__":
    main(tyro.cli(Options))
