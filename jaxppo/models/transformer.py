"""The decoder: one function from parameters and tokens to hidden states, for policy, reference, critic and engine."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxppo.models.attention import Implementation, packed_attention, precision_of
from jaxppo.models.collectives import ONE_DEVICE, Axes, Collectives, Kernel, unconstrained
from jaxppo.models.config import Architecture
from jaxppo.models.decode_attention import BLOCK, decode_attention
from jaxppo.models.layers import apply_rope, rms_norm, rope_angles, swiglu, wide
from jaxppo.models.parameters import Params, parameter_axes

Remat = Literal["none", "dots", "full"]
Constrain = Callable[[jax.Array, Axes], jax.Array]
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]
"""(q, k, v) -> (mixed values, what is kept of the layer)."""

QUERIES, KEYS = ("batch", "seq", "heads", None), ("batch", "seq", "kv_heads", None)
"""Logical axes of whole rows."""


@flax.struct.dataclass
class KVCache:
    """Each layer's keys and values by slot; the token at position p of a slot lies at index p."""

    k: tuple[Float[Array, "S N G K"], ...]
    v: tuple[Float[Array, "S N G K"], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder's architecture with how it is computed. `params` is what `load` read, or None."""

    config: Architecture
    params: Params = None
    dtype: Any = jnp.bfloat16
    """Of products and activations."""
    param_dtype: Any = jnp.float32
    remat: Remat = "full"
    unroll: bool = False
    """Layers are written out one after the other instead of looped over."""
    attention: Implementation = "xla"
    kernel: Kernel | None = None
    """Computes `forward`'s packed attention in place of `attention`'s own: a plan's, where there is no GPU."""
    constrain: Constrain = unconstrained
    """Pins an activation's layout on the mesh by its logical axes, where XLA partitions the program."""
    row_shards: int = 1
    """Over how many devices the rows of a batch are split."""
    mesh: Collectives = ONE_DEVICE
    """How `forward` is spread over devices."""
    collectives: Collectives = ONE_DEVICE
    """What layers call; a mesh's only inside `mesh.spread` (see `per_device`)."""

    def forward(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm, in the model's dtype. Padding gives finite values of no meaning."""
        model = self.per_device()

        def kernel(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
            return packed_attention(q, k, v, segment_ids, self.attention)

        def hidden(params: Params, tokens: Array, positions: Array, segment_ids: Array) -> Array:
            def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
                packed = kernel if self.kernel is None else self.kernel
                return self.mesh.attend(packed, q, k, v, segment_ids, self.config.num_kv_heads), None

            return model._decode(params, tokens, positions, attend)[0]

        names = ("embed", "layers", "norm")
        axes = {name: parameter_axes(self.config)[name] for name in names}
        inside, whole = ("batch", "seq_inside"), ("batch", "seq")
        spread = self.mesh.spread(hidden, (axes, inside, inside, whole), ("batch", "seq_between", None))
        return spread({name: params[name] for name in names}, tokens, positions, segment_ids)

    def per_device(self) -> "Model":
        """The model as each device computes it, on its rows, tokens and parts of the parameters."""
        return dataclasses.replace(self, collectives=self.mesh, constrain=unconstrained)

    def prefill(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "L B T G K"], Float[Array, "L B T G K"]]:
        """forward, with the keys and values of every layer for a cache."""

        def kernel(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
            return packed_attention(q, *self._own(k, v), segment_ids, self.attention)

        spread = self.mesh.spread(kernel, (QUERIES, KEYS, KEYS, ("batch", "seq")), QUERIES)

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
            return spread(q, k, v, segment_ids), (k, v)

        hidden, (keys, values) = self._decode(params, tokens, positions, attend)
        return hidden, keys, values

    def decoding_params(self, params: Params) -> Params:
        """The parameters as `decode` takes them: each layer's apart, cast to the compute dtype and gathered once."""
        layers = [
            self._whole({name: x[i] for name, x in params["layers"].items()}) for i in range(self.config.num_layers)
        ]
        embeddings = {
            name: self.constrain(params[name].astype(self.dtype), ("vocab", "embed"))
            for name in ("embed", "head")
            if name in params
        }
        return params | embeddings | {"layers": layers}

    def decode(
        self,
        params: Params,
        tokens: Int[Array, " S"],
        positions: Int[Array, " S"],
        active: Bool[Array, " S"],
        cache: KVCache,
    ) -> tuple[Float[Array, "S D"], KVCache]:
        """Hidden states of one further token of each active slot, whose key and value enter the cache at its position.

        `params` are `decoding_params`. Layers are written out, since a scan would copy what it carries of the cache.
        """
        slots = jnp.where(active, jnp.arange(tokens.shape[0]), tokens.shape[0])
        lengths = jnp.where(active, positions + 1, 0)
        cos, sin = rope_angles(positions[:, None], self.config.head_dim, self.config.rope)
        x = self.constrain(params["embed"][tokens[:, None]].astype(self.dtype), ("batch", "seq", "embed"))
        keys, values = list(cache.k), list(cache.v)

        def kernel(q: Array, k: Array, v: Array, lengths: Array) -> Array:
            return decode_attention(q[:, 0], *self._own(k, v), lengths, self.attention)[:, None]

        spread = self.mesh.spread(kernel, (QUERIES, KEYS, KEYS, ("batch",)), QUERIES)
        for i, weights in enumerate(params["layers"]):

            def attend(q: Array, k: Array, v: Array, i: int = i) -> tuple[Array, None]:
                keys[i] = keys[i].at[slots, positions].set(k[:, 0], mode="drop")
                values[i] = values[i].at[slots, positions].set(v[:, 0], mode="drop")
                return spread(q, keys[i], values[i], lengths), None

            x, _ = self._layer(weights, x, cos, sin, attend)
        hidden = rms_norm(x[:, 0], params["norm"], self.config.rms_norm_eps)
        return hidden, KVCache(k=tuple(keys), v=tuple(values))

    def init_cache(self, slots: int, length: int) -> KVCache:
        """An empty cache for `slots` sequences of up to `length` tokens."""
        c = self.config
        shape = (slots, -(-length // BLOCK) * BLOCK, c.num_kv_heads, c.head_dim)

        def empty() -> tuple[Array, ...]:
            return tuple(self.constrain(jnp.zeros(shape, self.dtype), KEYS) for _ in range(c.num_layers))

        return KVCache(k=empty(), v=empty())

    def _own(self, k: Array, v: Array) -> tuple[Array, Array]:
        heads = self.config.num_kv_heads
        return self.mesh.own_kv_heads(k, heads), self.mesh.own_kv_heads(v, heads)

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

    def _decode(self, params: Params, tokens: Array, positions: Array, attend: Attend) -> tuple[Array, Any]:
        cos, sin = rope_angles(positions, self.config.head_dim, self.config.rope)
        x = self.collectives.lookup(params["embed"], tokens, self.dtype)
        x = self.constrain(x, ("batch", "seq", "embed"))

        def layer(x: Array, weights: Params) -> tuple[Array, Any]:
            # cast here, a layer at a time: no copy of all parameters in the compute dtype ever exists
            return self._layer(self._whole(weights), x, cos, sin, attend)

        alone = self.collectives is ONE_DEVICE
        body = checkpointed(layer, self.remat, prevent_cse=self.unroll, gathers=not alone)
        x, kept = jax.lax.scan(body, x, params["layers"], unroll=self.unroll)
        norm = self.collectives.gather(params["norm"], ("embed",))
        return rms_norm(x, norm, self.config.rms_norm_eps), kept

    def _whole(self, weights: Params) -> Params:
        """A layer's weights in the compute dtype (those of norms stay as they are), whole in their embed dimension."""

        def whole(name: str, x: Array) -> Array:
            axes = parameter_axes(self.config)["layers"][name][1:]
            x = x if "norm" in name else x.astype(self.dtype)
            return self.constrain(self.collectives.gather(x, axes), axes)

        return {name: whole(name, x) for name, x in weights.items()}

    def _layer(self, w: Params, x: Array, cos: Array, sin: Array, attend: Attend) -> tuple[Array, Any]:
        mixed, kept = self._attention(w, x, cos, sin, attend)
        x = x + mixed
        x = x + self._mlp(w, x)
        return self.constrain(x, ("batch", "seq", "embed")), kept

    def _attention(self, w: Params, x: Array, cos: Array, sin: Array, attend: Attend) -> tuple[Array, Any]:
        y = self.collectives.enter(rms_norm(x, w["attention_norm"], self.config.rms_norm_eps))

        def project(name: str, axis: str) -> Array:
            z = jnp.einsum("btd,hkd->bthk", y, w[name], precision=precision_of(x))
            z = z + w[f"{name}_bias"] if self.config.attention_bias else z
            return self.constrain(z, ("batch", "seq", axis, None))

        q, k, v = project("q", "heads"), project("k", "kv_heads"), project("v", "kv_heads")
        mixed, kept = attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)
        out = jnp.einsum("bthk,dhk->btd", mixed, w["o"], precision=precision_of(x))
        return self.collectives.leave(out), kept

    def _mlp(self, w: Params, x: Array) -> Array:
        y = self.collectives.enter(rms_norm(x, w["mlp_norm"], self.config.rms_norm_eps))
        precision = precision_of(x)
        gate = jnp.einsum("btd,fd->btf", y, w["gate"], precision=precision)
        up = jnp.einsum("btd,fd->btf", y, w["up"], precision=precision)
        hidden = self.constrain(swiglu(gate, up), ("batch", "seq", "mlp"))
        return self.collectives.leave(jnp.einsum("btf,df->btd", hidden, w["down"], precision=precision))


def checkpointed(layer: Callable, remat: Remat, prevent_cse: bool, gathers: bool = False) -> Callable:
    """The layer with what its backward pass recomputes: nothing, all but matrix products, or everything.

    What it `gathers` from other devices is never kept for the backward pass: all layers' weights would exist at once.
    Outside a loop the compiler must be kept from merging what is recomputed with the first computation.
    """
    match remat:
        case "none" if gathers:
            return jax.checkpoint(layer, policy=_is_not_gathered, prevent_cse=prevent_cse)
        case "none":
            return layer
        case "dots":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            return jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)
        case "full":
            return jax.checkpoint(layer, prevent_cse=prevent_cse)


def _is_not_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name != "all_gather"
