"""The value head: a critic is the decoder's parameters with one more entry, `value_head`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo.models.config import Architecture
from jaxppo.models.layers import wide
from jaxppo.models.logprobs import TokenRows, shift_right
from jaxppo.models.parameters import Params
from jaxppo.models.transformer import Model


def init_value_head(architecture: Architecture, dtype: jnp.dtype | None = None) -> Params:
    """All zeros: a fresh critic predicts 0 everywhere, and its first gradients come from the returns alone."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, dtype or s.dtype), abstract_value_head(architecture))


def abstract_value_head(architecture: Architecture) -> Params:
    return {
        "kernel": jax.ShapeDtypeStruct((architecture.hidden_size,), jnp.float32),
        "bias": jax.ShapeDtypeStruct((), jnp.float32),
    }


def value_head_axes() -> Params:
    return {"kernel": (None,), "bias": ()}


def values(model: Model, params: Params, batch: TokenRows) -> Float[Array, "B T"]:
    """V of the state in which token t is chosen, float32: kernel · hidden[t - 1] + bias."""
    hidden = wide(model.forward(params, batch.tokens, batch.positions, batch.segment_ids))
    head = params["value_head"]
    value = jnp.einsum("btd,d->bt", hidden, head["kernel"], precision=jax.lax.Precision.HIGHEST) + head["bias"]
    return shift_right(model.constrain(value, ("batch", "seq")), batch.mask)
