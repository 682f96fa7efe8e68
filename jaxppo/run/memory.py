"""What leaves the GPU during rollouts, and how full the GPU was at the end of each phase."""

import ctypes
import dataclasses
import resource
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxppo.parallel.offload import to_device, to_host
from jaxppo.run.compiling import compile_clock
from jaxppo.step.state import TrainState

PARTS = {"optimizer": ("actor_opt", "critic_opt"), "critic": ("critic",)}
"""What rollout.offload names -> fields of the state. The reference is no part of it: see run.setup."""


def send_away(state: TrainState, offload: Sequence[str]) -> TrainState:
    """The state with the named parts in pinned host memory; the given ones are dead afterwards."""
    fields = [field for part in offload if part in PARTS for field in PARTS[part]]
    return dataclasses.replace(state, **{field: to_host(getattr(state, field)) for field in fields})


def bring_back(state: TrainState, offload: Sequence[str]) -> TrainState:
    """The inverse of `send_away`."""
    fields = [field for part in offload if part in PARTS for field in PARTS[part]]
    return dataclasses.replace(state, **{field: to_device(getattr(state, field)) for field in fields})


def memory_metrics(phase: str) -> dict[str, float]:
    """GiB on this process's first GPU: in use by everyone now, and jax's greatest so far. Empty without a GPU."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return {}
    metrics = {f"perf/memory_gib/{phase}": _in_use(device.local_hardware_id) / 2**30}
    stats = device.memory_stats()  # None with XLA_PYTHON_CLIENT_ALLOCATOR=platform
    if stats is not None and "peak_bytes_in_use" in stats:
        metrics[f"perf/jax_peak_memory_gib/{phase}"] = stats["peak_bytes_in_use"] / 2**30
    return metrics


def process_metrics() -> dict[str, float]:
    """What must not grow from step to step: resident host memory in GiB, live arrays, compilations so far."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    arrays = jax.live_arrays()
    return {
        "perf/host_memory_gib": pages * resource.getpagesize() / 2**30,
        "perf/live_arrays": float(len(arrays)),
        "perf/live_arrays_gib": sum(x.nbytes for x in arrays) / 2**30,
        "perf/compilations": float(compile_clock().compilations),
    }


def _in_use(ordinal: int) -> int:
    """Bytes of the GPU that any process holds, asked of the driver in the context that jax and vLLM share."""
    cuda = ctypes.CDLL("libcuda.so.1")
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    calls = (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDeviceGet(ctypes.byref(handle), ordinal),
        lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle),
        lambda: cuda.cuCtxPushCurrent_v2(context),
        lambda: cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
        lambda: cuda.cuCtxPopCurrent_v2(ctypes.byref(context)),
        lambda: cuda.cuDevicePrimaryCtxRelease_v2(handle),
    )
    for call in calls:
        if code := call():
            raise RuntimeError(f"the CUDA driver answered {code} to a question about its memory")
    return total.value - free.value
