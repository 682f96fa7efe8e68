"""vLLM's parameters, and how tensors with Hugging Face names get into them. Torch and vLLM only; knows no jax.

Two ways in, and why neither is vLLM's own weight-transfer API (start_weight_update, update_weights,
finish_weight_update): that API's transports (NCCL, CUDA IPC) connect processes, and ours is one process, in which
an exported IPC handle cannot even be opened; and its receiving side only warns of a layer for which nothing came.

- Where parameters lie as vLLM's loaders filled them (CUDA, not quantized), the first publish watches which copies
  those loaders make, and every later one makes the same copies in one batched call: the loaders' Python, not the
  memory, is what 269 MB in 270 tensors cost.
- Where vLLM repacked them after loading (oneDNN on CPUs), the API's receiving half (layerwise reload) is the only
  right way: it lays each layer out afresh, loads and repacks it, and copies the result to the old address.
"""

import contextlib
import dataclasses
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch.utils._python_dispatch import TorchDispatchMode  # pyright: ignore[reportMissingImports]

Tensors = dict[str, torch.Tensor]


class WeightsError(RuntimeError):
    """What was published is not what the engine has parameters for; the engine must not be sampled from."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """One copy that a loader makes: a window of the published tensor into a window of a parameter.

    Example, rank 1 of two tensor-parallel ones, k_proj [64, 32] row by row: shape of source [64, 32], window
    [32, 32] from element 1024 with strides (32, 1), into rows 96 to 128 of qkv_proj.
    """

    shape: torch.Size
    window: torch.Size
    stride: tuple[int, ...]
    offset: int
    into: torch.Tensor

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != self.shape or not tensor.is_contiguous():
            raise WeightsError(f"a tensor of shape {tuple(tensor.shape)} came, {tuple(self.shape)} was expected")
        return tensor.as_strided(self.window, self.stride, tensor.storage_offset() + self.offset)


class CopyRecorder(TorchDispatchMode):
    """Inside it, every `x.copy_(window of source)` is noted, and made."""

    def __init__(self, source: torch.Tensor) -> None:
        super().__init__()
        self.source = source
        self.copies: list[Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._is_window(args[1]):
            into, window = args[0], args[1]
            offset = window.storage_offset() - self.source.storage_offset()
            self.copies.append(Copy(self.source.shape, window.shape, window.stride(), offset, into))
        return func(*args, **(kwargs or {}))

    def _is_window(self, x: torch.Tensor) -> bool:
        return (
            x.untyped_storage().data_ptr() == self.source.untyped_storage().data_ptr() and x.dtype == self.source.dtype
        )


def checkpoint_names(model: torch.nn.Module) -> frozenset[str]:
    """The Hugging Face names that fill the model: vLLM's own, with its fused ones taken apart; tied ones once."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    names = set()
    for name, _ in model.named_parameters():
        path, leaf = name.rsplit(".", 1)
        parent, _, module = path.rpartition(".")
        parts = fused.get(module, [module])
        names |= {".".join(filter(None, (parent, part, leaf))) for part in parts}
    return frozenset(names)


class EngineWeights:
    """Fills the model of one vLLM worker. Every parameter must come, and nothing else: WeightsError otherwise."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model: Any = worker.model_runner.get_model()
        self._copies: dict[str, list[Copy]] = {}
        self.names = checkpoint_names(self._model)
        self.repacked = any(p.numel() == 0 for p in self._model.parameters())
        """Repacking leaves empty parameters behind."""

    @torch.inference_mode()
    def load(self, buckets: Iterable[Tensors], seed: int) -> None:
        """All parameters, each in exactly one bucket; then reads a few back, chosen by the seed, and compares."""
        seen: set[str] = set()
        sample = set(random.Random(seed).sample(sorted(self.names), min(4, len(self.names))))
        kept: Tensors = {}
        with self._session():
            for bucket in buckets:
                self._check(bucket, seen)
                seen |= bucket.keys()
                self._write(bucket)
                chosen = {name: bucket[name] for name in sample & bucket.keys()}
                if self.repacked:  # vLLM repacks a layer when its last tensor came
                    kept |= {name: tensor.clone() for name, tensor in chosen.items()}
                else:
                    self._verify(chosen)
                # the next bucket may reuse this one's memory, which jax frees on its own stream
                _synchronize()
            if missing := sorted(self.names - seen):
                raise WeightsError(f"vLLM has parameters that were not published: {_some(missing)}")
        self._verify(kept)

    def _check(self, bucket: Tensors, seen: set[str]) -> None:
        if unexpected := sorted(bucket.keys() - self.names):
            raise WeightsError(f"published, but vLLM's model has no such parameter: {_some(unexpected)}")
        if twice := sorted(bucket.keys() & seen):
            raise WeightsError(f"published twice: {_some(twice)}")

    def _write(self, bucket: Tensors) -> None:
        if self.repacked:
            self._model.load_weights(bucket.items())
            return
        known = {name: tensor for name, tensor in bucket.items() if name in self._copies}
        for name in bucket.keys() - known.keys():
            self._copies[name] = self._record(name, bucket[name])
        into, sources = [], []
        for name, tensor in known.items():
            for copy in self._copies[name]:
                into.append(copy.into)
                sources.append(copy.source(tensor))
        if into:
            torch._foreach_copy_(into, sources)  # pyright: ignore[reportPrivateImportUsage]

    def _record(self, name: str, tensor: torch.Tensor) -> list[Copy]:
        """Loads one tensor through vLLM's own loaders, which know fused and sharded layouts."""
        with CopyRecorder(tensor.contiguous()) as recorder:
            self._model.load_weights([(name, recorder.source)])
        if not recorder.copies:
            raise WeightsError(f"vLLM's loader did not use {name}")
        return recorder.copies

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        if not self.repacked:
            yield
            return
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.model_loader import reload  # pyright: ignore[reportMissingImports]

        with set_current_vllm_config(self._worker.vllm_config), torch.device(self._worker.device):
            reload.initialize_layerwise_reload(self._model)
            try:
                yield
            finally:  # after an error too: a later publish must find layers that it can lay out
                reload.finalize_layerwise_reload(self._model, self._worker.model_config)
                for layer in _tied_layers(self._model):
                    layer.quant_method.process_weights_after_loading(layer)

    def _verify(self, sent: Tensors) -> None:
        """The sampled tensors, read back from where the engine computes with them, have the bits that were sent."""
        if self.repacked:
            # the fused, split and repacked ones of these hold nothing to compare bit by bit
            own = dict(self._model.named_parameters())
            pairs = {n: [(own[n], x)] for n, x in sent.items() if n in own and own[n].shape == x.shape}
        else:
            pairs = {n: [(copy.into, copy.source(x)) for copy in self._copies[n]] for n, x in sent.items()}
        for name, both in pairs.items():
            if not all(torch.equal(into, source.to(into.dtype)) for into, source in both):
                raise WeightsError(f"{name} in vLLM's memory differs from what was published")


def _tied_layers(model: torch.nn.Module) -> list[Any]:
    """Those whose parameter belongs to an earlier layer: a tied head. Nothing is loaded into them by name, so the
    layerwise reload of vLLM 0.32 leaves their repacked copy as it was: outputs of old weights.
    """
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        own = {id(p) for p in layer.parameters(recurse=False)}
        if own & seen:
            tied.append(layer)
        seen |= own
    return tied


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
