"""What devices exchange: read from the compiled program, and attention on a mesh against attention on one device."""

import dataclasses
import math
import re
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.config import MeshConfig
from jaxppo.models import Params
from jaxppo.models.attention import packed_attention
from jaxppo.models.logprobs import token_logprobs
from jaxppo.parallel.collectives import collectives
from jaxppo.parallel.mesh import make_mesh, row_sharding
from jaxppo.step.init import actor_shardings
from tests.tiny import on_mesh, tiny_model

LAYERS, VOCAB, MLP, EMBED, ROWS, TOKENS = 3, 88, 40, 32, 10, 36
"""No two dimensions of the program are equal by chance: 3 layers of 4 heads of 8, on fsdp x context x tensor = 8."""
COLLECTIVE = re.compile(r"= (.*?) (all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(-start)?\(")


ONE = MeshConfig(data=1, fsdp=1)


@flax.struct.dataclass
class Rows:
    tokens: Any
    positions: Any
    segment_ids: Any
    mask: Any


class Program:
    """The gradient of the log-probabilities, compiled for a mesh."""

    def __init__(self, mesh_config: MeshConfig) -> None:
        """Of a network with biases whose head is the embedding table."""
        self.mesh = make_mesh(mesh_config, jax.devices()[: 1 if mesh_config == ONE else 8])
        sizes = {"vocab_size": VOCAB, "intermediate_size": MLP, "num_hidden_layers": LAYERS}
        network = tiny_model(**sizes, model_type="qwen2", tie_word_embeddings=True)
        network = dataclasses.replace(network, remat="none")  # even then no gathered weight is kept
        model, self.layouts = on_mesh(network, self.mesh), actor_shardings(network, self.mesh)
        self.arrays = jax.device_put((network.params, random_rows()), (self.layouts, row_sharding(self.mesh, 0)))

        def loss(params: Params, rows: Rows) -> jax.Array:
            logp, entropy = token_logprobs(model, params, rows, 0.7)
            return (logp * rows.positions + entropy).sum()

        self.run = jax.jit(jax.grad(loss), out_shardings=self.layouts).lower(*self.arrays).compile()
        self.text = self.run.as_text()
        # a group of one device exchanges nothing
        self.lines = [x for x in self.text.splitlines() if COLLECTIVE.search(x) and "replica_groups={{0}," not in x]

    def results(self, kind: str) -> list[tuple[int, ...]]:
        """Shapes, largest first, that collectives of a kind give."""
        found = [m for line in self.lines if (m := COLLECTIVE.search(line)) and m[2] == kind]
        return sorted({s for m in found for s in shapes(m[1])}, key=math.prod, reverse=True)


def shapes(text: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, dims.split(","))) for dims in re.findall(r"(?:f|bf|s|pred)\d*\[([\d,]+)\]", text)]


def random_rows() -> Rows:
    """Segments of 7 tokens, of which 3 are the prompt; the last one, cut off, is padding."""
    segment = np.arange(TOKENS) // 7 + 1
    segment[segment == segment[-1]] = 0
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, TOKENS))
    position = np.arange(TOKENS) % 7
    arrays = tokens, *(np.broadcast_to(x, tokens.shape) for x in (position, segment))
    return Rows(*(x.astype(np.int32) for x in arrays), np.broadcast_to((position > 2) & (segment > 0), tokens.shape))


@pytest.fixture(scope="module")
def program() -> Program:
    return Program(MeshConfig(fsdp=2, context=2, tensor=2))


def test_gradients_are_those_of_one_device(program):
    one = Program(ONE)
    for got, want in zip(*(jax.tree.leaves(p.run(*p.arrays)) for p in (program, one)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.abs(want).max()))


LAYER = {(MLP // 2, EMBED), (EMBED, MLP // 2), (2, 8, EMBED), (1, 8, EMBED), (EMBED, 2, 8), (EMBED,)}
"""A layer's weights as tensor splits them, whole in their embed dimension."""


def test_weights_are_gathered_a_layer_at_a_time(program):
    gathered = set(program.results("all-gather"))
    assert gathered >= LAYER
    assert not any((LAYERS, *shape) in shapes(program.text) for shape in LAYER)


def test_their_gradients_are_reduce_scattered(program):
    scattered = set(program.results("reduce-scatter"))
    for shape in LAYER:
        assert tuple(d // 4 if d == EMBED else d for d in shape) in scattered, shape
    # what is left to sum in full: a norm's part over tensor, and numbers per token
    assert all(len(shape) == 1 or shape[0] in (LAYERS, ROWS // 2) for shape in program.results("all-reduce"))
    assert math.prod(program.results("all-reduce")[0]) <= ROWS * TOKENS


def test_the_vocabulary_stays_split(program):
    assert not any(VOCAB in shape for shape in shapes(program.text))
    assert (VOCAB // 2, EMBED) in program.results("all-gather")  # the head, but no embedding table: tokens go there
    assert sum(f"[{VOCAB // 2},{EMBED}]" in line for line in program.lines if " all-gather(" in line) == 1


def test_a_row_is_never_whole_outside_attention(program):
    hidden = [s for s in program.results("all-gather") + program.results("reduce-scatter") if len(s) == 3]
    assert {s[1] for s in hidden if s[0] == ROWS // 2} == {TOKENS // 2, TOKENS // 4}
    assert (ROWS // 2, TOKENS, EMBED) not in shapes(program.text)
    over_context = [line for line in program.lines if " all-to-all(" in line and "{0,2}" in line]
    assert len(over_context) >= 4  # q, k, v and back


@pytest.mark.parametrize(
    ("mesh_config", "heads", "kv_heads"),
    [
        (MeshConfig(context=2, tensor=2), 4, 4),
        (MeshConfig(context=4, tensor=2), 8, 4),  # a tensor part has 2 KV heads for 4 devices
        (MeshConfig(context=2, tensor=4), 8, 2),  # fewer KV heads than tensor parts
        (MeshConfig(fsdp=1, context=2, tensor=3), 12, 4),  # neither divides the other
        (MeshConfig(context=8, tensor=1), 8, 1),
    ],
    ids=str,
)
def test_attention_over_context_and_tensor_is_attention(mesh_config, heads, kv_heads):
    mesh = make_mesh(mesh_config, jax.devices()[: 6 if mesh_config.tensor == 3 else 8])
    keys = jax.random.split(jax.random.key(0), 4)
    rows, length, size = 4, 24, 4
    q, weight = (jax.random.normal(key, (rows, length, heads, size)) for key in keys[:2])
    k, v = (jax.random.normal(key, (rows, length, kv_heads, size)) for key in keys[2:])
    segments = jnp.asarray(np.repeat([[1, 2, 3, 0]], [7, 9, 5, 3], axis=1).repeat(rows, axis=0), jnp.int32)

    def kernel(*arrays: jax.Array) -> jax.Array:
        assert arrays[0].shape[1] == arrays[3].shape[1]
        return packed_attention(*arrays, "xla")

    def results(attend: Any) -> Any:
        def loss(*x: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = attend(*x, segments)
            return (out * weight).sum(), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    between = collectives(mesh)
    tokens, kv = ("batch", "seq_inside", "heads", None), ("batch", "seq_inside", "kv_heads", None)
    spread = between.spread(lambda *x: between.attend(kernel, *x, kv_heads), (tokens, kv, kv, ("batch", "seq")), tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), results(spread), results(kernel))
