"""Boundaries of packed rows and the recurrence that stops at them."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from jaxppo.rl.segments import backward_recurrence, continues, last_tokens, starts
from tests import oracle
from tests.rl import rows

IDS = jnp.array([[1, 1, 2, 3, 3, 0, 0], [4, 4, 4, 4, 4, 4, 4]])


def test_boundaries_golden():
    assert_array_equal(jax.jit(continues)(IDS), [[1, 0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]])
    assert_array_equal(jax.jit(starts)(IDS), [[0, 0, 2, 3, 3, 5, 5], [0, 0, 0, 0, 0, 0, 0]])


def test_the_recurrence_golden():
    decay, increment = jnp.array([0.5, 0.0, 2.0, 9.0]), jnp.array([1.0, 2.0, 3.0, 4.0])
    assert_allclose(jax.jit(backward_recurrence)(decay, increment), [2, 2, 11, 4])


def test_last_tokens_are_one_per_sequence_that_has_any():
    packed = rows.make(0)
    last = jax.jit(last_tokens)(jnp.asarray(packed.mask), jnp.asarray(packed.segment_ids))
    expected = {s[-1] for s in oracle.sequences(packed.mask, packed.segment_ids) if s}
    assert {(b, t) for b, t in np.argwhere(last)} == expected
