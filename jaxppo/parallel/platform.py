"""What jax and vLLM read from the environment when they start: set here, from the config, before either does.

Values that the user exported stand; where they cannot be met together with the config, an error says so.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

from jaxppo.config import Config, ConfigError

RESERVED = 0.05
"""Of a GPU's memory, for what neither pool counts: two CUDA contexts, CUDA graphs, collectives' buffers."""

JAX_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def prepare(config: Config, environ: MutableMapping[str, str] = os.environ) -> None:
    """Call it before jax touches a device and before vllm is imported. Raises ConfigError where memory cannot fit."""
    if config.rollout.engine != "vllm":
        return
    defaults = {
        # one process: weights go over as pointers, and requests keep their order
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        JAX_FRACTION: f"{jax_fraction(config.rollout.gpu_memory_utilization):.3f}",
    }
    if config.rollout.sleep_level:
        # jax must give back what it frees, or vLLM could not wake up
        defaults |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    for name, value in defaults.items():
        environ.setdefault(name, value)
    _check_split(config.rollout.gpu_memory_utilization, environ[JAX_FRACTION])
    if environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise ConfigError(
            f"VLLM_ENABLE_V1_MULTIPROCESSING = {environ['VLLM_ENABLE_V1_MULTIPROCESSING']}: rollout.engine = 'vllm' "
            "shares weights inside one process, only 0 is valid"
        )


def keep_compilations() -> None:
    """Programs compiled for a GPU are kept on disk and found again by the next run.

    JAX_COMPILATION_CACHE_DIR says where, if not in the user's cache; JAX_ENABLE_COMPILATION_CACHE=false keeps none.
    """
    import jax

    if jax.default_backend() == "gpu" and jax.config.values["jax_compilation_cache_dir"] is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(cache / "jaxppo" / "xla"))


def jax_fraction(gpu_memory_utilization: float) -> float:
    """What is left of a GPU for jax. Example: 0.5 for vLLM leaves 0.45."""
    if not 0 < gpu_memory_utilization < 1 - RESERVED:
        raise ConfigError(
            f"rollout.gpu_memory_utilization = {gpu_memory_utilization}: must lie between 0 and {1 - RESERVED}, "
            f"so that jax ({JAX_FRACTION}) gets a share too"
        )
    return 1 - RESERVED - gpu_memory_utilization


def _check_split(vllm: float, jax: str) -> None:
    try:
        fraction = float(jax)
    except ValueError:
        raise ConfigError(f"{JAX_FRACTION} = {jax!r}: must be a number between 0 and 1") from None
    if vllm + fraction > 1 - RESERVED + 1e-3:
        raise ConfigError(
            f"rollout.gpu_memory_utilization = {vllm} and {JAX_FRACTION} = {fraction} do not fit one GPU: together "
            f"at most {1 - RESERVED}"
        )
