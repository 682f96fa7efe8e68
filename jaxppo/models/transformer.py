"""The decoder: one function from parameters and tokens to hidden states, for policy, reference, critic and engine."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxppo.models.attention import Implementation, masked_attention, packed_attention, precision_of
from jaxppo.models.config import Architecture
from jaxppo.models.layers import apply_rope, rms_norm, rope_angles, swiglu, wide
from jaxppo.models.parameters import Params

Remat = Literal["none", "dots", "full"]
Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]
"""(q, k, v, what earlier layers handed on) -> (mixed values, what later layers get)."""


@flax.struct.dataclass
class KVCache:
    """Keys and values by layer and slot; the token at position p of a slot lies at index p."""

    k: Float[Array, "L S N G K"]
    v: Float[Array, "L S N G K"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder's architecture with how it is computed. `params` is what `load` read, or None."""

    config: Architecture
    params: Params = None
    dtype: Any = jnp.bfloat16
    """Of products and activations."""
    param_dtype: Any = jnp.float32
    remat: Remat = "full"
    attention: Implementation = "xla"
    constrain: Constrain = lambda x, axes: x
    """Pins an activation's layout on the mesh by its logical axes."""
    row_shards: int = 1
    """Over how many devices the rows of a batch are split."""

    def forward(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm, in the model's dtype. Padding gives finite values of no meaning."""

        def attend(q: Array, k: Array, v: Array, _: None) -> tuple[Array, None]:
            return packed_attention(q, k, v, segment_ids, self.attention), None

        return self._decode(params, tokens, positions, attend, None)[0]

    def forward_cached(
        self,
        params: Params,
        tokens: Int[Array, "S Q"],
        positions: Int[Array, "S Q"],
        cache: KVCache,
        window: int | None = None,
    ) -> tuple[Float[Array, "S Q D"], KVCache]:
        """Hidden states of Q further tokens of each slot, whose keys and values enter the cache at their positions.

        A token sees the cache up to its own position. Prefill and decode are the same call. Of the cache only the
        first `window` indices are read (None: all): a token at or beyond it gets a finite output of no meaning.
        """
        slots = jnp.arange(tokens.shape[0])[:, None]
        window = cache.k.shape[2] if window is None else window
        visible = jnp.arange(window) <= positions[:, :, None]

        def attend(q: Array, k: Array, v: Array, state: tuple[KVCache, Array]) -> tuple[Array, tuple[KVCache, Array]]:
            # carried from layer to layer and written in place: slicing layers out and stacking them again copies all
            cache, layer = state
            cache = KVCache(k=cache.k.at[layer, slots, positions].set(k), v=cache.v.at[layer, slots, positions].set(v))
            mixed = masked_attention(q, _read(cache.k, layer, window), _read(cache.v, layer, window), visible)
            return mixed, (cache, layer + 1)

        hidden, (cache, _) = self._decode(params, tokens, positions, attend, (cache, jnp.int32(0)))
        return hidden, cache

    def init_cache(self, slots: int, length: int) -> KVCache:
        """An empty cache for `slots` sequences of up to `length` tokens."""
        c = self.config
        shape = (c.num_layers, slots, length, c.num_kv_heads, c.head_dim)
        return KVCache(k=jnp.zeros(shape, self.dtype), v=jnp.zeros(shape, self.dtype))

    def head(self, params: Params) -> Float[Array, "V D"]:
        """The output embedding; the input's where they are tied."""
        return params["embed"] if self.config.tied_embeddings else params["head"]

    def unembed(self, params: Params, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Logits, in float32."""
        return self.logits(hidden, self.head(params).astype(self.dtype))

    def logits(self, hidden: Float[Array, "*batch D"], head: Float[Array, "V D"]) -> Float[Array, "*batch V"]:
        """hidden · head, accumulated in float32."""
        return jnp.einsum(
            "...d,vd->...v",
            hidden,
            head,
            precision=precision_of(hidden),
            preferred_element_type=wide(hidden[:0]).dtype,
        )

    def _decode(self, params: Params, tokens: Array, positions: Array, attend: Attend, state: Any) -> tuple[Array, Any]:
        cos, sin = rope_angles(positions, self.config.head_dim, self.config.rope)
        x = self.constrain(params["embed"][tokens].astype(self.dtype), ("batch", "seq", "embed"))

        def layer(carry: tuple[Array, Any], weights: Params) -> tuple[tuple[Array, Any], None]:
            x, state = carry
            # cast here, a layer at a time: no copy of all parameters in the compute dtype ever exists
            w = {name: a if "norm" in name else a.astype(self.dtype) for name, a in weights.items()}
            mixed, state = self._attention(w, x, cos, sin, attend, state)
            x = x + mixed
            x = x + self._mlp(w, x)
            return (self.constrain(x, ("batch", "seq", "embed")), state), None

        (x, state), _ = jax.lax.scan(checkpointed(layer, self.remat), (x, state), params["layers"])
        return rms_norm(x, params["norm"], self.config.rms_norm_eps), state

    def _attention(self, w: Params, x: Array, cos: Array, sin: Array, attend: Attend, state: Any) -> tuple[Array, Any]:
        y = rms_norm(x, w["attention_norm"], self.config.rms_norm_eps)

        def project(name: str, axis: str) -> Array:
            z = jnp.einsum("btd,hkd->bthk", y, w[name], precision=precision_of(x))
            z = z + w[f"{name}_bias"] if self.config.attention_bias else z
            return self.constrain(z, ("batch", "seq", axis, None))

        q, k, v = project("q", "heads"), project("k", "kv_heads"), project("v", "kv_heads")
        mixed, state = attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, state)
        return jnp.einsum("bthk,dhk->btd", mixed, w["o"], precision=precision_of(x)), state

    def _mlp(self, w: Params, x: Array) -> Array:
        y = rms_norm(x, w["mlp_norm"], self.config.rms_norm_eps)
        precision = precision_of(x)
        gate = jnp.einsum("btd,fd->btf", y, w["gate"], precision=precision)
        up = jnp.einsum("btd,fd->btf", y, w["up"], precision=precision)
        hidden = self.constrain(swiglu(gate, up), ("batch", "seq", "mlp"))
        return jnp.einsum("btf,df->btd", hidden, w["down"], precision=precision)


def _read(cache: Float[Array, "L S N G K"], layer: Int[Array, ""], window: int) -> Float[Array, "S W G K"]:
    """A layer's first `window` keys or values of every slot."""
    _, slots, _, groups, size = cache.shape
    return jax.lax.dynamic_slice(cache, (layer, 0, 0, 0, 0), (1, slots, window, groups, size))[0]


def checkpointed(layer: Callable, remat: Remat) -> Callable:
    """The layer with what its backward pass recomputes: nothing, all but matrix products, or everything."""
    match remat:
        case "none":
            return layer
        case "dots":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            return jax.checkpoint(layer, policy=policy, prevent_cse=False)
        case "full":
            return jax.checkpoint(layer, prevent_cse=False)
