"""The built-in engine: the trainer's own weights on its own mesh, without a copy."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxppo.config import UserError
from jaxppo.models import Model
from jaxppo.models.cudnn import max_segments
from jaxppo.rollout.decode import Queue, Shape, make_generate
from jaxppo.rollout.engine import Completion, Sampling
from jaxppo.rollout.prefill import GroupShape, pack_prompts

PROMPTS_MULTIPLE = 64
"""Calls with a different number of prompts share a program up to the next multiple."""
PREFILL_TOKENS = 4096
"""Of one device's rows in a prefill pass: enough to fill its matrix products, few enough not to hold decoding up."""
PREFILL_ROW = 2048
"""Of one row, which has room for 16 prompts."""


class JaxEngine:
    """Continuous batching over `max_num_seqs` slots; see the Engine protocol for what it promises.

    One program is compiled for each combination of greedy / top_k / top_p / n and of the number of prompts (in
    multiples of PROMPTS_MULTIPLE), none for lengths, temperatures or seeds.
    """

    def __init__(self, model: Model, *, max_num_seqs: int, max_prompt_length: int, max_response_length: int) -> None:
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._max_prompt_length = max_prompt_length
        self._max_response_length = max_response_length
        self._params: Any = None
        self._version = -1
        self._programs: dict[Shape, Callable] = {}

    def publish(self, params: Any, version: int) -> int:
        """Copies nothing: `generate` reads the trainer's arrays, and gathers what fsdp has split while it runs."""
        self._params, self._version = params, version
        return 0

    def sleep(self) -> None:
        """Nothing to give back: its weights are the trainer's, and its caches live inside `generate`."""

    def shrink(self) -> str:
        """A fifth fewer sequences decode at the same time from here on: tokens stay the same, memory does not.

        Raises UserError where there is one for each device already.
        """
        before, shards = self._max_num_seqs, self._model.row_shards
        if before <= shards:
            raise UserError(
                f"out of memory in the rollout with rollout.max_num_seqs = {before}: settings that need less are "
                "data.max_response_length, rollout.offload, and more devices on mesh.fsdp or mesh.tensor"
            )
        self._max_num_seqs = max(int(0.8 * before) // shards * shards, shards)
        self._programs.clear()
        return f"out of memory: rollout.max_num_seqs is {self._max_num_seqs} instead of {before} from here on"

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: jax.Array) -> list[Completion]:
        if self._params is None:
            raise RuntimeError("generate before the first publish")
        self._check(prompts, sampling)
        if not prompts:
            return []
        count = len(prompts) * sampling.n
        capacity = -(-len(prompts) // PROMPTS_MULTIPLE) * PROMPTS_MULTIPLE
        # every device has its share of the slots
        shards = self._model.row_shards
        slots = -(-min(self._max_num_seqs, capacity * sampling.n) // shards) * shards
        queue = self._queue(prompts, sampling, key, capacity, slots)
        shape = Shape(
            slots=slots,
            prompt_length=self._max_prompt_length,
            new_tokens=self._max_response_length,
            greedy=sampling.temperature == 0,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        if shape not in self._programs:
            self._programs[shape] = make_generate(self._model, shape)
        tokens, logprobs, lengths = jax.device_get(self._programs[shape](self._params, queue))
        return [
            self._completion(tokens[i, :n], logprobs[i, :n], sampling) for i, n in enumerate(lengths[:count].tolist())
        ]

    def _completion(self, tokens: np.ndarray, logprobs: np.ndarray, sampling: Sampling) -> Completion:
        reason = "stop" if int(tokens[-1]) in sampling.eos_ids else "length"
        return Completion(tokens, logprobs, reason, self._version)

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        vocab = self._model.config.vocab_size
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= self._max_prompt_length:
                raise UserError(
                    f"prompt {i} has {len(prompt)} tokens: 1 to data.max_prompt_length = {self._max_prompt_length} "
                    "are possible"
                )
            if not 0 <= min(prompt) <= max(prompt) < vocab:
                raise UserError(f"prompt {i} has a token outside the model's vocabulary of {vocab}")
        if not 1 <= sampling.max_new_tokens <= self._max_response_length:
            raise UserError(
                f"max_new_tokens = {sampling.max_new_tokens}: 1 to data.max_response_length = "
                f"{self._max_response_length} are possible"
            )

    def _queue(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: jax.Array, capacity: int, slots: int
    ) -> Queue:
        n, longest = sampling.n, self._max_prompt_length
        prompts_at_once = -(-slots // (8 * n))
        tokens = min(PREFILL_TOKENS, prompts_at_once * longest)
        row_length = max(longest, min(PREFILL_ROW, tokens))
        rows = self._model.row_shards * max(1, tokens // row_length)
        entries = min(slots, n * min(prompts_at_once, rows * max_segments(row_length)))
        shape = GroupShape(rows=rows, row_length=row_length, entries=entries, longest=longest)
        packed = pack_prompts(prompts, n, shape, shape.groups_bound(capacity, n))
        lengths = np.ones(capacity * n, np.int32)
        lengths[: len(prompts) * n] = np.repeat([len(prompt) for prompt in prompts], n)
        of = np.arange(capacity * n)
        # NumPy arrays: under several processes all give the same ones
        arrays: dict[str, Any] = {
            "tokens": packed.tokens,
            "positions": packed.positions,
            "segment_ids": packed.segment_ids,
            "sequences": packed.sequences,
            "starts": packed.starts,
            "groups": np.int32(packed.count),
            "prompt_lengths": lengths,
            "temperature": np.float32(sampling.temperature),
            "eos_ids": np.asarray(sampling.eos_ids, np.int32),
            "max_new_tokens": np.int32(sampling.max_new_tokens),
        }
        return Queue(keys=_sequence_keys(key, of // n, of % n), **arrays)


@jax.jit
def _sequence_keys(key: jax.Array, prompt: jax.Array, sample: jax.Array) -> jax.Array:
    """fold_in(fold_in(key, prompt), sample) for each sequence."""
    return jax.vmap(lambda i, j: jax.random.fold_in(jax.random.fold_in(key, i), j))(prompt, sample)
