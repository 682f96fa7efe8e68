"""Runs before any test imports jax: 8 virtual CPU devices, and annotations checked under pytest only."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["HF_HUB_OFFLINE"] = "1"

from jaxtyping import install_import_hook  # noqa: E402

CHECKED = [
    "jaxppo.rl",
    "jaxppo.models",
    *(f"jaxppo.step.{m}" for m in ("packing", "optimizer", "score", "update")),
]
install_import_hook(CHECKED, "beartype.beartype")
