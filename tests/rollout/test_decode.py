"""The device program on models whose every logit is known: ends of responses, seeds, and how many steps it takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.rollout.decode import Shape, make_generate
from jaxppo.rollout.engine import Completion, Sampling
from jaxppo.rollout.jax_engine import JaxEngine
from tests.fakes import UNIFORM, TableModel, independent, script
from tests.tiny import VOCAB, tiny_model

SAMPLING = Sampling(temperature=1.0, max_new_tokens=5, eos_ids=(2,))
ENDS = script([20, 5, 6, 2, 2], [21, 15, 2], [22, 7, 8, 9, 10, 11, 12], [23, 2], [24, 25, 26, 27, 2])
"""A first token decides the whole response."""


@pytest.fixture(scope="module")
def engine():
    return JaxEngine(TableModel(), max_num_seqs=4, max_prompt_length=3, max_response_length=5)


def run(engine: JaxEngine, table, prompts: list[list[int]], **sampling) -> list[Completion]:
    engine.publish(table, 0)
    return engine.generate(prompts, dataclasses.replace(SAMPLING, **sampling), jax.random.key(0))


@pytest.mark.parametrize(
    ("prompt", "eos", "limit", "response", "reason"),
    [
        ([20], (2,), 5, [5, 6, 2], "stop"),
        ([21], (2,), 5, [15, 2], "stop"),
        ([22], (2,), 5, [7, 8, 9, 10, 11], "length"),
        ([23], (2,), 5, [2], "stop"),
        ([2, 2, 20], (2,), 5, [5, 6, 2], "stop"),  # what the prompt holds does not count
        ([22], (2, 9), 5, [7, 8, 9], "stop"),
        ([22], (9, 8), 5, [7, 8], "stop"),
        ([24], (2,), 4, [25, 26, 27, 2], "stop"),  # EOS in the last place is no truncation
        ([22], (2,), 4, [7, 8, 9, 10], "length"),
        ([22], (2,), 1, [7], "length"),
    ],
)
def test_where_a_response_ends(engine, prompt, eos, limit, response, reason):
    (completion,) = run(engine, ENDS, [prompt], eos_ids=eos, max_new_tokens=limit)
    assert completion.tokens.tolist() == response
    assert completion.finish_reason == reason
    np.testing.assert_allclose(completion.logprobs, 0, atol=1e-6)


def test_an_eos_that_is_also_the_padding(engine):
    """Buffers are filled with 0: a response's end comes from its length."""
    a, b = run(engine, script([20, 5, 0, 0], [21, 6, 6, 6]), [[20], [21]], eos_ids=(0,))
    assert a.tokens.tolist() == [5, 0]
    assert (b.tokens.tolist(), b.finish_reason) == ([6] * 5, "length")


def test_token_t_of_sample_j_of_prompt_i_has_the_key_of_i_j_t(engine):
    key = jax.random.key(0)
    for at, completion in enumerate(run(engine, jnp.asarray(UNIFORM), [[3]] * 5, n=2, eos_ids=())):
        own = jax.random.fold_in(jax.random.fold_in(key, at // 2), at % 2)
        drawn = [int(jax.random.categorical(jax.random.fold_in(own, t), UNIFORM[0])) for t in range(5)]
        assert completion.tokens.tolist() == drawn
        np.testing.assert_allclose(completion.logprobs, -np.log(VOCAB), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "logp"),
    [({}, np.log(0.5)), ({"top_p": 0.7}, -0.470004), ({"top_k": 2}, -0.470004), ({"temperature": 0.0}, np.log(0.5))],
)
def test_log_probabilities_are_of_what_was_sampled_from(engine, settings, logp):
    completions = run(engine, independent([0.5, 0.3, 0.2]), [[3]] * 4, eos_ids=(), **settings)
    tokens = np.concatenate([c.tokens for c in completions])
    logprobs = np.concatenate([c.logprobs for c in completions])
    np.testing.assert_allclose(logprobs[tokens == 0], logp, atol=1e-6)
    assert (tokens == 0).any()


def steps(prompts: list[list[int]], slots: int, **sampling) -> list[int]:
    """The active slots of each decode step that it takes to answer the prompts with ENDS' responses."""
    model = TableModel()
    engine = JaxEngine(model, max_num_seqs=slots, max_prompt_length=5, max_response_length=6)
    run(engine, ENDS, prompts, **sampling)
    jax.effects_barrier()
    return model.steps


def test_no_step_is_made_after_the_last_end():
    assert steps([[23]] * 3, slots=2) == []  # a prompt's pass draws the first token
    assert steps([[21]] * 2, slots=2) == [2]


def test_a_slot_is_filled_again_while_others_go_on():
    """Five tokens in one slot take 4 steps; meanwhile 4 responses of two tokens pass through the other."""
    assert steps([[22]] + [[21]] * 4, slots=2) == [2, 2, 2, 2]


def test_more_samples_than_slots():
    assert steps([[21]], slots=2, n=5) == [2, 2, 1]


def test_the_cache_exists_once():
    """Beside the cache there is room for what a layer reads of it, not for another."""
    model = tiny_model(num_hidden_layers=4)
    shape = Shape(slots=64, prompt_length=8, new_tokens=120, greedy=True, top_k=-1, top_p=1.0)
    engine = JaxEngine(model, max_num_seqs=64, max_prompt_length=8, max_response_length=120)
    queue = engine._queue([[3]], SAMPLING, jax.random.key(0), 1, 64)
    memory = make_generate(model, shape).lower(model.params, queue).compile().memory_analysis()
    cache = sum(x.nbytes for x in jax.tree.leaves(model.init_cache(64, 128)))
    assert memory.temp_size_in_bytes < 2 * cache
