"""The forward pass on a mesh, as each device runs it: explicit collectives, none left to a partitioner to choose.

- fsdp (ZeRO-3): a layer's weights are gathered when it runs, forward and backward; its gradients are reduce-scattered.
- tensor (Megatron): heads, mlp and vocabulary are split inside a block; between blocks, the tokens are.
- context (Ulysses): a row's tokens are split; attention exchanges them for heads, all-to-all, and back.

Sources: Rajbhandari et al. 2020 (ZeRO), Shoeybi et al. 2019 and Korthikanti et al. 2022 (Megatron and its sequence
parallelism), Jacobs et al. 2023 (DeepSpeed-Ulysses).
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxppo.models.collectives import Axes, Collectives, Kernel
from jaxppo.models.layers import wide
from jaxppo.parallel.mesh import AXES, WEIGHT_AXES, partition_spec


def collectives(mesh: Mesh) -> Collectives:
    """Those of a mesh. One device has none, and keeps the program that has no mesh in it."""
    return Collectives() if mesh.size == 1 else MeshCollectives(mesh)


@dataclasses.dataclass(frozen=True)
class MeshCollectives(Collectives):
    """See Collectives for what each one is; they may be called inside `spread` alone."""

    mesh: Mesh

    def spread(self, function: Callable, inputs: Any, output: Any) -> Callable:
        def specs(axes: Any, arrays: Any) -> Any:
            return jax.tree.map(lambda a, x: partition_spec(self.mesh, a, x.shape), axes, arrays, is_leaf=_is_axes)

        def spread(*arrays: Any) -> Any:
            out = jax.tree.map(lambda a: partition_spec(self.mesh, a), output, is_leaf=_is_axes)
            # replication is not tracked: everything inside is written for the sum over devices of their own losses
            return jax.shard_map(
                function, mesh=self.mesh, in_specs=specs(inputs, arrays), out_specs=out, check_vma=False
            )(*arrays)

        return spread

    def gather(self, weight: Float[Array, "..."], axes: Axes) -> Float[Array, "..."]:
        return _gather(weight, axes.index("embed")) if "embed" in axes else weight

    def scatter(self, gradient: Float[Array, "..."], axes: Axes) -> Float[Array, "..."]:
        return jax.lax.psum_scatter(gradient, WEIGHT_AXES, scatter_dimension=axes.index("embed"), tiled=True)

    def enter(self, x: Float[Array, "B t D"]) -> Float[Array, "B u D"]:
        return jax.lax.all_gather(x, "tensor", axis=1, tiled=True)

    def leave(self, x: Float[Array, "B u D"]) -> Float[Array, "B t D"]:
        return jax.lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)

    def lookup(self, table: Float[Array, "V D"], tokens: Int[Array, "B u"], dtype: Any) -> Float[Array, "B t D"]:
        """The table stays where it is: every device looks up its columns for all tokens that the others ask for."""
        asked = jax.lax.all_gather(tokens, WEIGHT_AXES) - self.vocab_start(table.shape[0])
        here = (asked >= 0) & (asked < table.shape[0])
        columns = jnp.where(here[..., None], table[jnp.where(here, asked, 0)], 0).astype(dtype)
        return self.leave(jax.lax.all_to_all(columns, WEIGHT_AXES, split_axis=0, concat_axis=3, tiled=True)[0])

    def attend(
        self,
        kernel: Kernel,
        q: Float[Array, "B u h K"],
        k: Float[Array, "B u g K"],
        v: Float[Array, "B u g K"],
        segment_ids: Int[Array, "B T"],
        kv_heads: int,
    ) -> Float[Array, "B u h K"]:
        """Each device gets whole rows of h / context of its h heads; KV heads are repeated where there are fewer."""
        context = self.mesh.shape["context"]
        k, v = (self.own_kv_heads(x, kv_heads) for x in (k, v))
        k, v = (jnp.repeat(x, context // math.gcd(x.shape[2], context), axis=2) for x in (k, v))
        exchange = partial(jax.lax.all_to_all, axis_name="context", tiled=True)
        q, k, v = (exchange(x, split_axis=2, concat_axis=1) for x in (q, k, v))
        return exchange(kernel(q, k, v, segment_ids), split_axis=1, concat_axis=2)

    def own_kv_heads(self, x: Float[Array, "B T g K"], kv_heads: int) -> Float[Array, "B T own K"]:
        tensor = self.mesh.shape["tensor"]
        if kv_heads % tensor == 0:
            return x
        x = jnp.repeat(x, tensor // math.gcd(kv_heads, tensor), axis=2)
        own = x.shape[2] // tensor
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("tensor") * own, own, axis=2)

    def vocab_start(self, size: int) -> Int[Array, ""]:
        return jax.lax.axis_index("tensor") * size

    def vocab_sum(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return jax.lax.psum(x, "tensor")

    def vocab_logsumexp(self, logits: Float[Array, "... V"]) -> Float[Array, "..."]:
        # of the parts' own ones, which are finite
        parts = jax.nn.logsumexp(logits, axis=-1)
        largest = jax.lax.pmax(parts, "tensor")
        return largest + jnp.log(jax.lax.psum(jnp.exp(parts - largest), "tensor"))

    def most(self, count: Int[Array, ""]) -> Int[Array, ""]:
        return jax.lax.pmax(count, AXES)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(weight: Array, dimension: int) -> Array:
    return jax.lax.all_gather(weight, WEIGHT_AXES, axis=dimension, tiled=True)


def _gather_forward(weight: Array, dimension: int) -> tuple[Array, None]:
    # bare, so that a checkpoint's policy sees which primitive it is
    return jax.lax.all_gather(weight, WEIGHT_AXES, axis=dimension, tiled=True), None


def _gather_backward(dimension: int, _: None, gradient: Array) -> tuple[Array]:
    total = jax.lax.psum_scatter(wide(gradient), WEIGHT_AXES, scatter_dimension=dimension, tiled=True)
    return (total.astype(gradient.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def _is_axes(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(a, str | None) for a in x)
