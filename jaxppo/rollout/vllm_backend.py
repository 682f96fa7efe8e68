"""vLLM itself, in this process: its start, its requests and its memory. Torch and vLLM only; knows no jax.

The engine core must not fork into a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=0, set by
parallel.platform before anything starts): only then can weights go over as pointers.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

from jaxppo.config import ConfigError, RolloutConfig, UserError
from jaxppo.rollout.engine import Completion, Sampling
from jaxppo.rollout.vllm_weights import EngineWeights

BLOCK_SIZE = 64
"""Tokens of a KV-cache block. Dropping the prefix cache visits every block in Python, and a small model on a large GPU
has 180,000 blocks of vLLM's usual 16 tokens."""

FIRST_PORT = 29600
"""Where the processes of a host's first tensor-parallel engine meet; the next engine takes the next port."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VLLMSettings:
    """What vLLM is started with, apart from the rollout section. Lengths in tokens."""

    folder: str
    """Hugging Face folder: only its config.json is read."""
    dtype: str
    max_model_len: int
    process_index: int = 0
    num_processes: int = 1


class VLLMBackend:
    """One vLLM engine on this process's GPU (or CPU), with weights that are worthless until the first load."""

    def __init__(self, rollout: RolloutConfig, settings: VLLMSettings) -> None:
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise RuntimeError("parallel.platform.prepare was not called: vLLM would start a process of its own")
        _check_device(rollout)
        try:
            with _captures_of_this_thread():
                self._llm = LLM(
                    model=settings.folder,
                    dtype=settings.dtype,
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # nothing of the folder's own sampling defaults
                    max_model_len=settings.max_model_len,
                    max_num_seqs=rollout.max_num_seqs,
                    max_num_batched_tokens=max(rollout.max_num_batched_tokens, settings.max_model_len),
                    gpu_memory_utilization=rollout.gpu_memory_utilization,
                    enforce_eager=rollout.enforce_eager,
                    enable_sleep_mode=rollout.sleep_level > 0,
                    logprobs_mode="processed_logprobs",
                    enable_prefix_caching=True,
                    block_size=BLOCK_SIZE,
                    **_layout(rollout, settings),
                )
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            hint = "" if rollout.enforce_eager else "; rollout.enforce_eager = true starts it without CUDA graphs"
            raise UserError(f"vLLM did not start: {reason}{hint}") from error
        [worker] = self._llm.collective_rpc(lambda worker: worker)
        self.weights = EngineWeights(worker)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def load(self, buckets: Iterable[dict[tuple[str, ...], Any]], seed: int) -> None:
        """Fills every parameter from buckets of {names: stack of their arrays}, on this GPU. See EngineWeights."""
        self.weights.load(map(_unstack, buckets), seed)

    def reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache: a request still holds blocks of it")

    def sleep(self, level: int) -> None:
        self._llm.sleep(level=level)

    def wake_up(self, tag: str) -> None:
        """Takes back the memory of "weights" or of "kv_cache"."""
        self._llm.wake_up(tags=[tag])

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], version: int
    ) -> list[Completion]:
        """One completion for each prompt and its seed, in their order."""
        requests: list[Any] = [{"prompt_token_ids": list(map(int, prompt))} for prompt in prompts]
        params = [self._params(sampling, seed) for seed in seeds]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [_completion(output.outputs[0], version) for output in outputs]

    def _params(self, sampling: Sampling, seed: int) -> Any:
        return SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            seed=seed,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            # ours are the only ends of a response, and a stop token stays in the response
            ignore_eos=True,
            stop_token_ids=list(sampling.eos_ids),
        )


def _completion(output: Any, version: int) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a response with {output.finish_reason!r}")
    flat = output.logprobs
    return Completion(
        tokens=np.asarray(output.token_ids, np.int32),
        # one list for all positions, the sampled token first in each
        logprobs=np.asarray(flat.logprobs, np.float32)[np.asarray(flat.start_indices, np.int64)],
        finish_reason=output.finish_reason,
        weights_version=version,
    )


def _unstack(bucket: dict[tuple[str, ...], Any]) -> dict[str, torch.Tensor]:
    """Views of the same memory: DLPack hands over a pointer, after torch's stream waits for jax's."""
    return {
        name: tensor
        for names, stack in bucket.items()
        for name, tensor in zip(names, torch.from_dlpack(stack).unbind(), strict=True)
    }


def _layout(rollout: RolloutConfig, settings: VLLMSettings) -> dict[str, Any]:
    """One engine per process; or, for tensor parallelism, one over that many neighbouring processes of one host.

    vLLM calls the latter an external launcher and reads a launcher's variables. Every engine is a world of its own.
    """
    size = rollout.tensor_parallel_size
    if size == 1:
        return {}
    if settings.num_processes % size:
        raise ConfigError(
            f"rollout.tensor_parallel_size = {size} does not divide the number of processes, {settings.num_processes}"
        )
    engine, rank = divmod(settings.process_index, size)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",  # each process sees its own GPU alone
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(FIRST_PORT + engine),
    }
    return {"tensor_parallel_size": size, "distributed_executor_backend": "external_launcher"}


def _check_device(rollout: RolloutConfig) -> None:
    if not torch.cuda.is_available():
        if rollout.sleep_level:
            raise ConfigError(
                f"rollout.sleep_level = {rollout.sleep_level}: on a CPU vLLM cannot sleep, only 0 is valid"
            )
    elif torch.cuda.device_count() > 1:
        raise ConfigError(
            f"rollout.engine = 'vllm' runs one process per GPU, but this one sees {torch.cuda.device_count()}: "
            "give each process its own through CUDA_VISIBLE_DEVICES"
        )


@contextmanager
def _captures_of_this_thread() -> Iterator[None]:
    """While vLLM records CUDA graphs, jax's threads may take and return memory: only the recording thread must not."""
    usual = torch.cuda.graph.__init__

    def thread_local(self: Any, *args: Any, **kwargs: Any) -> None:
        usual(self, *args, **({"capture_error_mode": "thread_local"} | kwargs))

    torch.cuda.graph.__init__ = thread_local
    try:
        yield
    finally:
        torch.cuda.graph.__init__ = usual
