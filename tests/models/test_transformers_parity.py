"""The same numbers as transformers, from folders that it wrote: logits, log-probabilities, gradients, files."""

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (gives NumPy its bfloat16)
import numpy as np
import pytest

from jaxppo.models import load
from jaxppo.models.huggingface import to_hf
from jaxppo.models.logprobs import token_logprobs

GOLDENS = Path(__file__).parents[1] / "goldens"
FAMILIES = ["qwen2_tied", "llama_llama3", "llama_yarn"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    folder = GOLDENS / request.param
    golden = np.load(folder / "golden.npz")
    tokens = jnp.asarray(golden["tokens"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    batch = types.SimpleNamespace(
        tokens=tokens, positions=positions, segment_ids=jnp.ones_like(tokens), mask=positions > 0
    )
    return load(folder, dtype="float32", attention="xla"), golden, batch


def test_logits(family):
    model, golden, batch = family
    logits = jax.jit(lambda p: model.unembed(p, model.forward(p, batch.tokens, batch.positions, batch.segment_ids)))(
        model.params
    )
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-5, rtol=1e-5)


def test_log_probabilities_and_every_gradient(family):
    model, golden, batch = family

    def mean(params):
        logp, _ = token_logprobs(model, params, batch, 1.0)
        return logp[:, 1:].mean(), logp

    (_, logp), grads = jax.jit(jax.value_and_grad(mean, has_aux=True))(model.params)
    np.testing.assert_allclose(logp[:, 1:], golden["logp"], atol=1e-5)
    named = dict(to_hf(model.config, grads))
    assert {f"grad:{name}" for name in named} == {key for key in golden if key.startswith("grad:")}
    for name, grad in named.items():
        np.testing.assert_allclose(grad, golden[f"grad:{name}"], atol=1e-5, rtol=1e-5, err_msg=name)
