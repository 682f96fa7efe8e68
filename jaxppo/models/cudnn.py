"""cuDNN's packed attention: [T, T] scores never exist, and a row's segments are separate sequences of one kernel.

It is reached through a private function of jax, since jax.nn.dot_product_attention knows no segments; all of that is
in this file. Before jax 0.11.1 grouped queries read the wrong keys without an error.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxppo.config import UserError

TOKENS_PER_SEGMENT = 256


def max_segments(row_length: int) -> int:
    """Segments that a row may have, which packing keeps to: one per 256 tokens, but at least 16.

    It is the kernel's static capacity, and its backward pass takes time for every one, used or not (32 instead of 16
    make it a third slower at 4,096 tokens). A row with more gives NaN, never a wrong number.
    """
    return max(16, row_length // TOKENS_PER_SEGMENT)


def require(dtype: jnp.dtype) -> None:
    """Raises UserError that says what is missing for this kernel: jax >= 0.11.1, a Hopper GPU or newer, bfloat16."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
    if version < (0, 11, 1):
        raise UserError(
            f"model.attention = 'cudnn_packed' needs jax >= 0.11.1, this is {jax.__version__}; 'xla' is valid"
        )
    if jax.default_backend() != "gpu":
        raise UserError(
            f"model.attention = 'cudnn_packed' needs a GPU, this is {jax.default_backend()}; 'xla' is valid"
        )
    capability = float(jax.devices()[0].compute_capability)
    if capability < 9:
        raise UserError(
            f"model.attention = 'cudnn_packed' needs compute capability 9.0 (Hopper), this is {capability}; "
            "'xla' is valid"
        )
    if dtype != jnp.bfloat16:
        raise UserError(f"model.attention = 'cudnn_packed' needs model.dtype = 'bfloat16', not {dtype}; 'xla' is valid")


def segment_table(
    segment_ids: Int[Array, "B T"], capacity: int
) -> tuple[Int[Array, "B M"], Int[Array, "B M1"], Bool[Array, " B"]]:
    """(lengths [B, M], starts [B, M + 1], whether the row fits) of segments 1, 2, ...; -1 fills what is not used.

    Example: segment_ids = 1 1 1 2 2 0 with M = 3 gives lengths 3 2 -1, starts 0 3 -1 -1.
    """
    numbers = jnp.arange(1, capacity + 1)
    of_segment = segment_ids[:, None, :] == numbers[:, None]
    lengths = of_segment.sum(-1, dtype=jnp.int32)
    starts = jnp.argmax(of_segment, -1).astype(jnp.int32)
    starts = jnp.pad(jnp.where(lengths > 0, starts, -1), ((0, 0), (0, 1)), constant_values=-1)
    return jnp.where(lengths > 0, lengths, -1), starts, segment_ids.max(-1) <= capacity


def cudnn_packed_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, "B T H K"]:
    """packed_attention by cuDNN. Segments of a row are 1, 2, ... from left to right; padding gives 0."""
    require(q.dtype)
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    lengths, starts, fits = segment_table(segment_ids, max_segments(q.shape[1]))
    real = (segment_ids != 0)[..., None, None]
    # the kernel leaves padding's outputs and gradients unwritten: `where` on both sides keeps them out
    q, k, v = (jnp.where(real, x, 0) for x in (q, k, v))
    out: Any = dot_product_attention(
        q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=starts, kv_offsets=starts,
        scale=q.shape[-1] ** -0.5, mask_type=MaskType.PADDING_CAUSAL,
    )  # fmt: skip
    return jnp.where(fits[:, None, None, None], jnp.where(real, out, 0), jnp.nan)
