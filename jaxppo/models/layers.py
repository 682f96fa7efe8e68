"""The decoder's elementwise parts: RMSNorm, rotary positions, SwiGLU."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxppo.models.config import Rope


def wide(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x in float32, or as it is in float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms_norm(x: Float[Array, "*batch D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*batch D"]:
    """x / √(mean(x²) + eps) · weight, in float32. Source: Zhang & Sennrich 2019."""
    y = wide(x)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return (y * weight).astype(x.dtype)


def rope_angles(
    positions: Int[Array, "*batch"], head_dim: int, rope: Rope
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """cos and sin of position · frequency, float32, of each pair of dimensions (i, i + head_dim / 2)."""
    frequencies, scale = _frequencies(head_dim, rope)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rope(
    x: Float[Array, "*batch H K"], cos: Float[Array, "*batch half"], sin: Float[Array, "*batch half"]
) -> Float[Array, "*batch H K"]:
    """Rotates each pair (x_i, x_{i + K/2}) by its angle, in float32. Source: Su et al. 2021."""
    first, second = jnp.split(wide(x), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def swiglu(gate: Float[Array, "*shape"], up: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """silu(gate) · up."""
    return jax.nn.silu(gate) * up


def _frequencies(head_dim: int, rope: Rope) -> tuple[Float[Array, " half"], float]:
    """theta^(-2i / head_dim), stretched as the type says, and the factor on cos and sin."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    base = rope.theta**-exponents
    match rope.type:
        case "default":
            return base, 1.0
        case "linear":
            return base / rope.factor, 1.0
        case "llama3":
            return _llama3(base, rope), 1.0
        case "yarn":
            scale = rope.attention_factor
            return _yarn(base, head_dim, rope), 0.1 * math.log(rope.factor) + 1 if scale is None else scale


def _llama3(base: Float[Array, " half"], rope: Rope) -> Float[Array, " half"]:
    """Long wavelengths are divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    wavelengths = 2 * math.pi / base
    ratio = rope.original_max_positions / wavelengths
    blend = (ratio - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = jnp.clip(blend, 0, 1)
    return blend * base + (1 - blend) * base / rope.factor


def _yarn(base: Float[Array, " half"], head_dim: int, rope: Rope) -> Float[Array, " half"]:
    """Dimensions that turn more than beta_fast times within the original context keep their frequency, those
    under beta_slow turns are interpolated, a ramp lies between. Source: Peng et al. 2023, section 3.2.
    """

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    ramp = (jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / max(high - low, 0.001)
    keep = 1 - jnp.clip(ramp, 0, 1)
    return keep * base + (1 - keep) * base / rope.factor
