"""The start-up test of kernels: it passes what is right and stops what is not."""

import jax.numpy as jnp
import pytest

from jaxppo.config import UserError
from jaxppo.models import kernels


def test_equal_kernels_pass():
    assert kernels.packed_difference("xla") == 0
    kernels.verify_kernels("xla")


def test_the_interpreted_decoding_kernel_passes():
    assert 0 < kernels.decoding_difference("cudnn_packed", interpret=True) < kernels.TOLERANCE


@pytest.mark.parametrize("fault", [lambda x: x * 1.1, lambda x: x.at[0, 5].set(jnp.nan)])
def test_a_kernel_that_is_off_stops_the_run(monkeypatch, fault):
    right = kernels.packed_attention

    def packed_attention(q, k, v, ids, implementation):
        out = right(q, k, v, ids, "xla")
        return fault(out) if implementation == "cudnn_packed" else out

    monkeypatch.setattr(kernels, "packed_attention", packed_attention)
    monkeypatch.setattr(kernels, "decoding_difference", lambda implementation: 0.0)
    with pytest.raises(UserError, match=r"model.attention = 'cudnn_packed': on this GPU .*'xla' is valid"):
        kernels.verify_kernels("cudnn_packed")
