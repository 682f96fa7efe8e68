"""The one table of parameters: shape, logical axes, initial values and Hugging Face name of each.

Every matrix is stored as Hugging Face stores it, (out, in), with heads as a dimension of their own and the layers
stacked in front: so import, export and engine sync are slices and reshapes, never transpositions.
"""

import dataclasses
import math
import zlib
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxppo.models.config import Architecture

Params = Any
"""A nested dict of arrays."""
Path = tuple[str, ...]
Init = Literal["normal", "zeros", "ones"]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One leaf of the parameter tree.

    Example, queries of a network of 2 layers, 4 heads of 8, 32 hidden: shape (2, 4, 8, 32), axes ("layers", "heads",
    "head_dim", "embed"), name "model.layers.{layer}.self_attn.q_proj.weight", flat (32, 32).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init
    name: str
    """In the file."""

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layers"

    @property
    def flat(self) -> tuple[int, ...]:
        """The shape of one layer's tensor in the file, where heads x head_dim is one dimension."""
        sizes: list[int] = []
        for size, axis in list(zip(self.shape, self.axes, strict=True))[self.stacked :]:
            if axis == "head_dim":
                sizes[-1] *= size
            else:
                sizes.append(size)
        return tuple(sizes)


def declare(architecture: Architecture) -> dict[Path, Parameter]:
    """Every parameter of a network."""
    sizes = {
        "layers": architecture.num_layers,
        "vocab": architecture.vocab_size,
        "embed": architecture.hidden_size,
        "mlp": architecture.intermediate_size,
        "heads": architecture.num_heads,
        "kv_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
    }

    def one(name: str, *axes: str, init: Init = "normal") -> Parameter:
        return Parameter(tuple(sizes[axis] for axis in axes), axes, init, name)

    def layer(name: str, *axes: str, init: Init = "normal") -> Parameter:
        return one(f"model.layers.{{layer}}.{name}", "layers", *axes, init=init)

    layers = {
        "attention_norm": layer("input_layernorm.weight", "embed", init="ones"),
        "q": layer("self_attn.q_proj.weight", "heads", "head_dim", "embed"),
        "k": layer("self_attn.k_proj.weight", "kv_heads", "head_dim", "embed"),
        "v": layer("self_attn.v_proj.weight", "kv_heads", "head_dim", "embed"),
        "o": layer("self_attn.o_proj.weight", "embed", "heads", "head_dim"),
        "mlp_norm": layer("post_attention_layernorm.weight", "embed", init="ones"),
        "gate": layer("mlp.gate_proj.weight", "mlp", "embed"),
        "up": layer("mlp.up_proj.weight", "mlp", "embed"),
        "down": layer("mlp.down_proj.weight", "embed", "mlp"),
    }
    if architecture.attention_bias:
        layers |= {
            "q_bias": layer("self_attn.q_proj.bias", "heads", "head_dim", init="zeros"),
            "k_bias": layer("self_attn.k_proj.bias", "kv_heads", "head_dim", init="zeros"),
            "v_bias": layer("self_attn.v_proj.bias", "kv_heads", "head_dim", init="zeros"),
        }
    table: dict[Path, Parameter] = {("embed",): one("model.embed_tokens.weight", "vocab", "embed")}
    table |= {("layers", name): p for name, p in layers.items()}
    table[("norm",)] = one("model.norm.weight", "embed", init="ones")
    if not architecture.tied_embeddings:
        table[("head",)] = one("lm_head.weight", "vocab", "embed")
    return table


def build_tree(leaves: dict[Path, Any]) -> Params:
    """{("layers", "up"): x} -> {"layers": {"up": x}}."""
    tree: dict[str, Any] = {}
    for (*parents, last), value in leaves.items():
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def at(params: Params, path: Path) -> Any:
    """The leaf at a path."""
    for name in path:
        params = params[name]
    return params


def init_params(architecture: Architecture, key: jax.Array, param_dtype: Any = jnp.float32) -> Params:
    """Random initial parameters: matrices normal with initializer_range, norms 1, biases 0. Pure: may run under jit.

    Each parameter draws from a key of its own name, so that one more parameter changes no other.
    """

    def init(path: Path, p: Parameter) -> jax.Array:
        if p.init != "normal":
            return jnp.full(p.shape, p.init == "ones", param_dtype)
        own = jax.random.fold_in(key, zlib.crc32("/".join(path).encode()))
        return architecture.initializer_range * jax.random.normal(own, p.shape, param_dtype)

    return build_tree({path: init(path, p) for path, p in declare(architecture).items()})


def parameter_axes(architecture: Architecture) -> Params:
    """The parameter tree with each leaf's logical axes."""
    return build_tree({path: p.axes for path, p in declare(architecture).items()})


def abstract_params(architecture: Architecture, dtype: Any = jnp.float32) -> Params:
    """The parameter tree as shapes."""
    return build_tree({path: jax.ShapeDtypeStruct(p.shape, dtype) for path, p in declare(architecture).items()})


def count_params(architecture: Architecture) -> int:
    return sum(math.prod(p.shape) for p in declare(architecture).values())
