"""Advantages of whole responses: goldens by hand, the oracle in value and gradient, edge cases, and row order."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from jaxppo.config import MeshConfig
from jaxppo.parallel.mesh import make_mesh
from jaxppo.rl import advantages
from tests import oracle

ESTIMATORS = {
    "grpo": advantages.grpo,
    "dr_grpo": partial(advantages.grpo, norm_by_std=False),
    "rloo": advantages.rloo,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
    "opo": advantages.opo,
    "gpg": advantages.gpg,
    "grpo_passk": advantages.grpo_passk,
}
LENGTHS = np.array([1, 2, 3, 4, 5, 0, 2, 7, 9], np.float32)
IDS = np.array([4, 0, 4, 4, 0, 7, 4, -1, 4], np.int32)
SCORES = np.array([1, 0.5, 0, 0.25, -1, 2, 0.75, 99, 0], np.float32)


def everything(scores, ids, lengths):
    """One program for all of them."""
    return {name: f(scores, ids, *([lengths] if name == "opo" else [])) for name, f in ESTIMATORS.items()}


compiled = jax.jit(everything)
jacobians = jax.jit(jax.jacfwd(everything))


def run(name, scores, ids, lengths=None):
    """Padded to one length, so that every case shares the compiled program."""
    scores, ids = np.asarray(scores), np.asarray(ids, np.int32)
    lengths = np.ones(len(ids)) if lengths is None else np.asarray(lengths)
    extra = 9 - len(ids)
    filled = np.pad(scores, (0, extra), constant_values=5), np.pad(ids, (0, extra), constant_values=-1)
    lengths = np.pad(lengths, (0, extra)).astype(scores.dtype)
    result = compiled(*map(jnp.asarray, (*filled, lengths)))[name]
    assert_array_equal(result[len(ids) :], 0)
    return np.asarray(result[: len(ids)])


GOLDENS = {
    # scores 1 0 0 | 3 of groups 0 0 0 | 1; lengths 2 1 1 | 5
    "grpo": [2 / 3 / 3**-0.5, -1 / 3 / 3**-0.5, -1 / 3 / 3**-0.5, 3],
    "dr_grpo": [2 / 3, -1 / 3, -1 / 3, 3],
    "rloo": [1, -0.5, -0.5, 3],
    "reinforce_plus_plus_baseline": [2 / 3, -1 / 3, -1 / 3, 3],
    "opo": [0.5, -0.5, -0.5, 3],
    "gpg": [4 / 3, -2 / 3, -2 / 3, 6],
    "grpo_passk": [3**0.5, 0, 0, 0],
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_goldens(name):
    found = run(name, np.float32([1, 0, 0, 3]), [0, 0, 0, 1], [2, 1, 1, 5])
    assert_allclose(found, GOLDENS[name], rtol=1e-5)
    assert found.dtype == np.float32


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_oracle_agrees_in_value_and_gradient(name):
    scores, lengths = SCORES.astype(np.float64), LENGTHS.astype(np.float64)
    with jax.enable_x64(True):
        assert_allclose(run(name, scores, IDS, lengths), oracle.outcome(scores, IDS, name, lengths), rtol=1e-9)
        slopes = jacobians(*map(jnp.asarray, (scores, IDS, lengths)))[name]
        for i, slope in enumerate(slopes):
            expected = oracle.gradient(lambda x, i=i: oracle.outcome(x, IDS, name, lengths)[i], scores)
            # gpg counts scores that are exactly 0, where a difference quotient steps off
            where = scores != 0 if name == "gpg" else np.ones(len(IDS), bool)
            assert_allclose(slope[where], expected[where], atol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("score", [0.0, 0.1, -3.7])
def test_equal_scores_give_exactly_0(name, score):
    assert_array_equal(run(name, np.full(6, score, np.float32), [3, 3, 3, 8, 3, 8], [1, 2, 3, 4, 0, 9]), 0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_of_one_has_no_baseline(name):
    expected = {"grpo": 2 / (1 + 1e-6), "grpo_passk": 0}.get(name, 2)
    assert_allclose(run(name, np.float32([2]), [0]), [expected], rtol=1e-6)


def test_ties_at_the_top_give_nothing_and_ties_below_do_not_matter():
    assert_array_equal(run("grpo_passk", np.float32([1, 1, 0]), [0, 0, 0]), 0)
    lead = run("grpo_passk", np.float32([3, 1, 1]), [0, 0, 0])
    assert_allclose(lead, [2 / (4 / 3) ** 0.5, 0, 0], rtol=1e-5)


def test_responses_without_tokens_weigh_nothing_in_opo():
    assert_allclose(run("opo", np.float32([1, 0, 5]), [0, 0, 0], [1, 3, 0]), [0.75, -0.25, 4.75], rtol=1e-6)
    assert_allclose(run("opo", np.float32([1, 0]), [0, 0], [0, 0]), [1, 0])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_row_order_and_names_of_groups_do_not_matter(name):
    expected = run(name, SCORES, IDS, LENGTHS)
    order = np.random.default_rng(1).permutation(len(IDS))
    renamed = np.where(IDS < 0, -1, 10 - IDS)[order]
    assert_allclose(run(name, SCORES[order], renamed, LENGTHS[order]), expected[order], rtol=1e-5, atol=1e-6)


def test_devices_do_not_matter():
    """Groups lie across all of 8 devices."""
    arrays = [np.pad(x, (0, 7), constant_values=-1) for x in (SCORES, IDS, LENGTHS)]
    spread = NamedSharding(make_mesh(MeshConfig(data=8, fsdp=1)), PartitionSpec("data"))
    found = compiled(*(jax.device_put(x, spread) for x in arrays))
    for name in ESTIMATORS:
        assert_allclose(found[name][: len(IDS)], run(name, SCORES, IDS, LENGTHS), rtol=1e-5, atol=1e-6)
