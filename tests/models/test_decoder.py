"""Attention, cache, packing, log-probabilities and values of the tiny network."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.models import KVCache
from jaxppo.models.attention import packed_attention
from jaxppo.models.heads import init_value_head, values
from jaxppo.models.logprobs import token_logprobs
from tests.oracle import gradient
from tests.tiny import VOCAB, tiny_model

LENGTHS = (4, 3, 5)


def attention_oracle(q, k, v, ids):
    """Loops over rows, heads and tokens, in float64."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(*q.shape[:3]):
        seen = [s for s in range(t + 1) if ids[b, s] == ids[b, t]]
        scores = np.array([q[b, t, h] @ k[b, s, h // group] for s in seen]) / np.sqrt(q.shape[-1])
        p = np.exp(scores - scores.max())
        out[b, t, h] = sum(w * v[b, s, h // group] for w, s in zip(p / p.sum(), seen, strict=True))
    return out


def test_attention_equals_the_oracle_in_values_and_gradients():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 5, n, 2)) for n in (4, 2, 2))
    weight, ids = rng.normal(size=q.shape), np.array([[1, 1, 2, 2, 0]])
    with jax.enable_x64(True):

        def loss(q, k, v):
            out = packed_attention(q, k, v, jnp.asarray(ids), "xla")
            return (out * weight).sum(), out

        got, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*map(jnp.asarray, (q, k, v)))
    np.testing.assert_allclose(out, attention_oracle(q, k, v, ids), atol=1e-12)
    arrays = [q, k, v]
    for i, x in enumerate(arrays):

        def f(y, i=i):
            return float((attention_oracle(*arrays[:i], y, *arrays[i + 1 :], ids) * weight).sum())

        np.testing.assert_allclose(got[i], gradient(f, x), atol=1e-7)


@pytest.fixture(scope="module")
def model():
    return tiny_model(initializer_range=0.3)


@pytest.fixture(scope="module")
def sequences():
    rng = np.random.default_rng(1)
    return [rng.integers(3, VOCAB, n) for n in LENGTHS]


def layout(sequences, places, shape):
    """Rows with each sequence at its (row, start), numbered from the left."""
    tokens, positions, ids = (np.zeros(shape, np.int32) for _ in range(3))
    mask = np.zeros(shape, bool)
    for (row, start), sequence in zip(places, sequences, strict=True):
        span = slice(start, start + len(sequence))
        ids[row, span] = ids[row].max() + 1
        tokens[row, span], positions[row, span] = sequence, range(len(sequence))
        mask[row, start + 1 : start + len(sequence)] = True
    return types.SimpleNamespace(
        tokens=jnp.asarray(tokens),
        positions=jnp.asarray(positions),
        segment_ids=jnp.asarray(ids),
        mask=jnp.asarray(mask),
    )


LAYOUTS = {
    "right-padded": ([(0, 0), (1, 0), (2, 0)], (3, 7)),
    "left-padded": ([(0, 3), (1, 4), (2, 2)], (3, 7)),
    "packed": ([(0, 0), (0, 4), (0, 7)], (1, 14)),
}


@pytest.fixture(scope="module")
def by_layout(model, sequences):
    """(log-probability, entropy, value) of every token of every sequence, by layout; and all raw outputs."""
    head = init_value_head(model.config)
    params = {**model.params, "value_head": {**head, "kernel": jnp.linspace(-1, 1, 32, dtype=head["kernel"].dtype)}}

    @jax.jit
    def outputs(batch):
        batch = types.SimpleNamespace(**batch)
        return *token_logprobs(model, params, batch, 0.7), values(model, params, batch)

    found = {}
    for name, (places, shape) in LAYOUTS.items():
        raw = outputs(vars(layout(sequences, places, shape)))
        spans = [
            np.stack([np.asarray(x)[row, start : start + len(s)] for x in raw])
            for (row, start), s in zip(places, sequences, strict=True)
        ]
        found[name] = np.concatenate(spans, axis=1), raw
    return found


@pytest.mark.parametrize("name", ["left-padded", "packed"])
def test_the_layout_does_not_change_a_token(by_layout, name):
    np.testing.assert_allclose(by_layout[name][0], by_layout["right-padded"][0], atol=1e-5)


def test_outputs_are_finite_float32_and_0_where_nothing_was_chosen(by_layout):
    for tokens, raw in by_layout.values():
        assert all(x.dtype == jnp.float32 and bool(jnp.isfinite(x).all()) for x in raw)
        first = np.cumsum([0, *LENGTHS[:-1]])
        assert not tokens[:, first].any()
        entropy = np.delete(tokens[1], first)
        assert (entropy > 0).all()
        assert (entropy <= np.log(VOCAB)).all()


def test_decoding_with_a_cache_equals_the_forward_pass(model, sequences):
    """A prompt of 2 tokens enters slot 1 of 3, then a token at a time; the other slots are free."""
    batch = layout([sequences[2]], [(0, 0)], (1, 5))
    whole = model.forward(model.params, batch.tokens, batch.positions, batch.segment_ids)
    hidden, keys, values = model.prefill(
        model.params, *(x[:, :2] for x in (batch.tokens, batch.positions, batch.segment_ids))
    )
    parts, empty = [hidden[0]], model.init_cache(3, 5)
    cache = KVCache(
        *(
            tuple(c.at[1, :2].set(new[0]) for c, new in zip(old, news, strict=True))
            for old, news in ((empty.k, keys), (empty.v, values))
        )
    )
    params, step = model.decoding_params(model.params), jax.jit(model.decode)
    active = jnp.arange(3) == 1
    for t in range(2, 5):
        hidden, cache = step(params, jnp.full(3, batch.tokens[0, t]), jnp.full(3, t), active, cache)
        parts.append(hidden[1:2])
    np.testing.assert_allclose(jnp.concatenate(parts), whole[0], atol=1e-5)
    for layer in (*cache.k, *cache.v):
        assert not np.asarray(layer)[[0, 2]].any()


def test_chunks_equal_the_dense_formula_in_values_and_gradients(model, sequences):
    batch = layout(sequences, *LAYOUTS["packed"])
    weight = jax.random.normal(jax.random.key(5), (2, 1, 14))

    def chunked(params):
        logp, entropy = token_logprobs(model, params, batch, 0.7, chunk_bytes=2 * VOCAB * 4)
        return (weight[0] * logp + weight[1] * entropy).sum(), (logp, entropy)

    def dense(params):
        hidden = model.forward(params, batch.tokens, batch.positions, batch.segment_ids)
        log_p = jax.nn.log_softmax(model.unembed(params, hidden) / 0.7)
        logp = jnp.take_along_axis(log_p[:, :-1], batch.tokens[:, 1:, None], -1)[..., 0]
        entropy = -(jnp.exp(log_p) * log_p).sum(-1)[:, :-1]
        ids = batch.segment_ids
        chosen = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != 0)
        logp, entropy = (jnp.pad(jnp.where(chosen, x, 0), ((0, 0), (1, 0))) for x in (logp, entropy))
        return (weight[0] * logp + weight[1] * entropy).sum(), (logp, entropy)

    (got_grad, got), (want_grad, want) = (jax.jit(jax.grad(f, has_aux=True))(model.params) for f in (chunked, dense))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), got_grad, want_grad)


@pytest.mark.parametrize(("remat", "unroll"), [("none", False), ("dots", False), ("full", False), ("dots", True)])
def test_differentiating_does_not_change_one_bit_of_the_log_probabilities(model, sequences, remat, unroll):
    model = dataclasses.replace(model, remat=remat, unroll=unroll)
    batch = layout(sequences, *LAYOUTS["packed"])
    alone = jax.jit(lambda p: token_logprobs(model, p, batch, 0.7))(model.params)[0]

    def loss(params):
        logp, entropy = token_logprobs(model, params, batch, 0.7)
        return (logp * logp).sum() - 0.1 * entropy.sum(), logp

    (_, inside), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(model.params)
    np.testing.assert_array_equal(inside, alone)


def test_a_fresh_critic_predicts_next_to_nothing(model, sequences):
    params = {**model.params, "value_head": init_value_head(model.config)}
    assert jnp.abs(values(model, params, layout(sequences, *LAYOUTS["packed"]))).max() < 1


@pytest.mark.parametrize("remat", ["none", "full"])
def test_layers_written_out_compute_what_the_loop_computes(model, sequences, remat):
    batch = layout(sequences, *LAYOUTS["packed"])

    def loss(params, model):
        logp, _ = token_logprobs(model, params, batch, 0.7)
        return (logp * logp).sum(), logp

    (want_grad, want), (got_grad, got) = (
        jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)(
            model.params, dataclasses.replace(model, params=None, remat=remat, unroll=unroll)
        )
        for unroll in (False, True)
    )
    np.testing.assert_allclose(got, want, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), got_grad, want_grad)
