"""KL estimators per token, and the controllers of the KL penalty's coefficient.

Estimators: Schulman, "Approximating KL divergence", 2020. Controller: Ziegler et al., "Fine-Tuning Language
Models from Human Preferences", 2019, section 2.2. KL is in nats.
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxppo.rl.masked import full_precision


def kl_estimate(logp: Float[Array, "*shape"], ref_logp: Float[Array, "*shape"], kind: str) -> Float[Array, "*shape"]:
    """One-sample estimate of KL(π || ref) per token, for tokens drawn from π; with r = logp - ref_logp:

        kl, k1           r                        unbiased, may be negative
        abs              |r|
        mse, k2          r² / 2
        low_var_kl, k3   min(e⁻ʳ + r - 1, 10)     unbiased below the cap, never negative; r within ±20

    A trailing + keeps the estimator's value and takes the gradient of k2, which is on average that of the KL.
    Values and gradients are finite for all finite inputs. Raises ValueError for another kind.
    """
    log_ratio = full_precision(logp) - full_precision(ref_logp)
    k2 = 0.5 * jnp.square(log_ratio)
    match kind.removesuffix("+"):
        case "kl" | "k1":
            estimate = log_ratio
        case "abs":
            estimate = jnp.abs(log_ratio)
        case "mse" | "k2":
            estimate = k2
        case "low_var_kl" | "k3":
            # Bounded before exp: a cap on the result alone leaves 0 · inf = NaN in the gradient.
            d = jnp.clip(-log_ratio, -20, 20)
            estimate = jnp.minimum(jnp.expm1(d) - d, 10)
        case _:
            raise ValueError(f"KL kind {kind!r}: valid are kl, k1, abs, mse, k2, low_var_kl, k3, each also with +")
    if kind.endswith("+"):
        return k2 - jax.lax.stop_gradient(k2) + jax.lax.stop_gradient(estimate)
    return estimate


@flax.struct.dataclass
class KLState:
    """What a controller remembers. Example: AdaptiveKL(0.2, 6, 10000).init() has coef = 0.2."""

    coef: Any
    """A float32 scalar (in trees that describe one: its shape or sharding); multiplies the KL of the next step."""


@dataclasses.dataclass(frozen=True)
class FixedKL:
    """The coefficient stays. Raises ValueError unless kl_coef >= 0."""

    kl_coef: float

    def __post_init__(self) -> None:
        _require_coefficient(self.kl_coef)

    def init(self) -> KLState:
        return KLState(coef=jnp.asarray(self.kl_coef, jnp.float32))

    def update(self, state: KLState, kl: ArrayLike, num_sequences: ArrayLike) -> KLState:
        return state


@dataclasses.dataclass(frozen=True)
class AdaptiveKL:
    """Steers the KL towards target_kl:

        coef ← coef · (1 + clip(kl / target_kl - 1, -0.2, 0.2) · num_sequences / horizon)

    kl is the mean over the sequences of their token means, and so is target_kl (one meant for sums over
    tokens is some hundred times larger). num_sequences are those of the whole batch over all hosts; horizon
    is in sequences. Update once per step, after the coefficient was used. A KL that is not finite leaves it
    as it was, and it never falls below 0, which the formula alone allows for num_sequences > 5 horizon.
    Raises ValueError unless kl_coef >= 0, target_kl > 0 and horizon > 0.
    """

    kl_coef: float
    target_kl: float
    horizon: int

    def __post_init__(self) -> None:
        _require_coefficient(self.kl_coef)
        if not (math.isfinite(self.target_kl) and self.target_kl > 0):
            raise ValueError(f"target_kl = {self.target_kl}: must be a finite number > 0")
        if not self.horizon > 0:
            raise ValueError(f"horizon = {self.horizon}: must be > 0 sequences")

    def init(self) -> KLState:
        return KLState(coef=jnp.asarray(self.kl_coef, jnp.float32))

    def update(self, state: KLState, kl: ArrayLike, num_sequences: ArrayLike) -> KLState:
        kl = jnp.asarray(kl, jnp.float32)
        sequences = jnp.asarray(num_sequences, jnp.float32)
        error = jnp.clip(kl / self.target_kl - 1, -0.2, 0.2)
        factor = jnp.maximum(1 + error * sequences / self.horizon, 0)
        return KLState(coef=jnp.where(jnp.isfinite(kl), state.coef * factor, state.coef))


def _require_coefficient(kl_coef: float) -> None:
    if not (math.isfinite(kl_coef) and kl_coef >= 0):
        raise ValueError(f"kl_coef = {kl_coef}: must be a finite number >= 0")
