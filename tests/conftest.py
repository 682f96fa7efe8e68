"""Runs before any test imports jax: 8 virtual CPU devices, and annotations checked under pytest only."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Without LLVM's optimisations the suite compiles in half the time; runs of the command line keep them.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # 8 virtual devices on few busy cores may be late at a collective: XLA would abort the process after 40 seconds
        "--xla_cpu_collective_call_terminate_timeout_seconds=120",
    ]
)
os.environ["HF_HUB_OFFLINE"] = "1"

# Tests build the same tiny programs again and again: each is compiled once for the whole suite and its subprocesses.
cache = tempfile.TemporaryDirectory(prefix="jaxppo-test-cache-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

from jaxtyping import install_import_hook  # noqa: E402

CHECKED = [
    "jaxppo.rl",
    "jaxppo.models",
    *(f"jaxppo.step.{m}" for m in ("packing", "optimizer", "score", "update")),
]
install_import_hook(CHECKED, "beartype.beartype")
