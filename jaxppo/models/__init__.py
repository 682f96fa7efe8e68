"""Language models as pairs of a parameter tree and pure functions."""

from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxppo.models.attention import Implementation, resolve
from jaxppo.models.collectives import ONE_DEVICE, Collectives, unconstrained
from jaxppo.models.config import Architecture
from jaxppo.models.parameters import Params, abstract_params, init_params, parameter_axes
from jaxppo.models.transformer import Constrain, KVCache, Model, Remat

__all__ = [
    "Architecture",
    "KVCache",
    "Model",
    "Params",
    "abstract_params",
    "init_params",
    "load",
    "parameter_axes",
]


def load(
    path_or_config: str | Path | Architecture,
    key: jax.Array | None = None,
    *,
    dtype: Any = "bfloat16",
    param_dtype: Any = "float32",
    remat: Remat = "full",
    layers: Literal["auto", "scan", "unroll"] = "auto",
    attention: Implementation = "auto",
    constrain: Constrain = unconstrained,
    row_shards: int = 1,
    mesh: Collectives = ONE_DEVICE,
) -> Model:
    """A model with its parameters: those of a Hugging Face folder or hub id (host arrays), or random from a key.

    Raises UserError where the folder is missing, incomplete or of an unsupported architecture.
    """
    from jaxppo.models.huggingface import load_params, resolve_folder

    if isinstance(path_or_config, Architecture):
        architecture, folder = path_or_config, None
    else:
        folder = resolve_folder(str(path_or_config))
        architecture = Architecture.from_folder(folder)
    if key is not None:
        params = init_params(architecture, key, jnp.dtype(param_dtype))
    elif folder is not None:
        params = load_params(folder, architecture, jnp.dtype(param_dtype))
    else:
        params = None
    return Model(
        config=architecture,
        params=params,
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.dtype(param_dtype),
        remat=remat,
        unroll=layers == "unroll" or (layers == "auto" and jax.default_backend() == "gpu"),
        attention=resolve(attention, jax.default_backend()),
        constrain=constrain,
        row_shards=row_shards,
        mesh=mesh,
    )
