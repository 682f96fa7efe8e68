"""The built-in engine: right tokens, right log-probabilities, and nothing that depends on the company."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.config import MeshConfig, UserError
from jaxppo.models.logprobs import token_logprobs
from jaxppo.parallel.collectives import collectives
from jaxppo.parallel.mesh import constrain_fn, make_mesh, num_row_shards
from jaxppo.rollout.engine import Completion, Sampling
from jaxppo.rollout.jax_engine import JaxEngine
from jaxppo.step.packing import Rollout, pack
from jaxppo.step.state import microbatch
from tests.tiny import VOCAB, tiny_model

GREEDY = Sampling(temperature=0.0, max_new_tokens=6, eos_ids=(2,))
SAMPLED = Sampling(temperature=1.0, max_new_tokens=6, eos_ids=(2, 7, 11, 13, 17, 19))
PROMPTS = [list(range(3 + i, 4 + 2 * i)) for i in range(5)] + [[60], [2, 2]]


@pytest.fixture(scope="module")
def model():
    return tiny_model(initializer_range=0.3)


def engine_of(model, slots=4):
    engine = JaxEngine(model, max_num_seqs=slots, max_prompt_length=5, max_response_length=6)
    engine.publish(model.params, 0)
    return engine


@pytest.fixture(scope="module")
def engine(model):
    return engine_of(model)


@pytest.fixture(scope="module")
def sampled(engine) -> list[Completion]:
    return engine.generate(PROMPTS, SAMPLED, jax.random.key(1))


def same(a: list[Completion], b: list[Completion]) -> bool:
    return [x.tokens.tolist() for x in a] == [x.tokens.tolist() for x in b]


def test_greedy_tokens_are_those_of_the_whole_forward_pass(model, engine):
    forward = jax.jit(lambda t, p, s: model.unembed(model.params, model.forward(model.params, t, p, s)))
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, GREEDY, jax.random.key(0)), strict=True):
        row = np.zeros((1, 11), np.int32)
        sequence = [*prompt, *completion.tokens.tolist()]
        row[0, : len(sequence)] = sequence
        ids = (np.arange(11) < len(sequence)).astype(np.int32)[None]
        best = np.asarray(forward(row, np.arange(11, dtype=np.int32)[None], ids))[0].argmax(-1)
        assert completion.tokens.tolist() == best[len(prompt) - 1 : len(sequence) - 1].tolist()


def test_log_probabilities_are_the_trainers(model, sampled):
    rollouts = [
        Rollout(np.array(p, np.int32), c.tokens, c.logprobs, 0.0) for p, c in zip(PROMPTS, sampled, strict=True)
    ]
    batch = jax.tree.map(jnp.asarray, microbatch(pack(rollouts, 11, rows=len(rollouts)), 0, 0))
    logp, _ = jax.jit(lambda b: token_logprobs(model, model.params, b, 1.0))(batch)
    np.testing.assert_allclose(logp, batch.rollout_logp, atol=1e-5)


def test_a_response_ends_with_its_first_eos_or_is_cut(sampled, engine):
    for completion in [*sampled, *engine.generate(PROMPTS, GREEDY, jax.random.key(0))]:
        eos = SAMPLED.eos_ids if any(completion is c for c in sampled) else GREEDY.eos_ids
        inner, last = completion.tokens[:-1].tolist(), int(completion.tokens[-1])
        assert not set(inner) & set(eos)
        assert completion.finish_reason == ("stop" if last in eos else "length")
        assert completion.finish_reason == "stop" or len(completion.tokens) == 6
    assert {c.finish_reason for c in sampled} == {"stop", "length"}


def test_eos_at_the_very_last_place_is_not_a_truncation(engine, sampled):
    stopped = next(c for c in sampled if c.finish_reason == "stop" and len(c.tokens) > 1)
    limit = dataclasses.replace(SAMPLED, max_new_tokens=len(stopped.tokens))
    again = engine.generate(PROMPTS, limit, jax.random.key(1))[next(i for i, c in enumerate(sampled) if c is stopped)]
    assert again.tokens.tolist() == stopped.tokens.tolist()
    assert again.finish_reason == "stop"


def test_tokens_depend_on_the_key_and_on_nothing_else(model, engine, sampled):
    assert same(engine.generate(PROMPTS, SAMPLED, jax.random.key(1)), sampled)
    assert not same(engine.generate(PROMPTS, SAMPLED, jax.random.key(2)), sampled)
    assert same(engine.generate(PROMPTS[:2], SAMPLED, jax.random.key(1)), sampled[:2])
    others = [PROMPTS[0], *([61] for _ in PROMPTS[1:-1]), PROMPTS[-1]]
    found = engine.generate(others, SAMPLED, jax.random.key(1))
    assert same([found[0], found[-1]], [sampled[0], sampled[-1]])
    for slots in (2, 8):
        assert same(engine_of(model, slots).generate(PROMPTS, SAMPLED, jax.random.key(1)), sampled)


def test_samples_of_a_prompt_stand_side_by_side_and_differ(engine, sampled):
    three = engine.generate(PROMPTS, dataclasses.replace(SAMPLED, n=3), jax.random.key(1))
    assert len(three) == 3 * len(PROMPTS)
    assert same(three[::3], sampled)
    assert not same(three[1::3], sampled)


def test_one_program_whatever_the_number_of_prompts_their_lengths_and_the_temperature(engine, sampled):
    rng = np.random.default_rng(0)
    (program,) = [p for shape, p in engine._programs.items() if not shape.greedy]
    engine.generate(PROMPTS, SAMPLED, jax.random.key(0))
    compiled = program._cache_size()
    for n in (1, 3, 20):
        prompts = [rng.integers(3, VOCAB, rng.integers(1, 6)).tolist() for _ in range(n)]
        warm = dataclasses.replace(SAMPLED, temperature=1.0 + n / 10)
        assert len(engine.generate(prompts, warm, jax.random.key(n))) == n
    assert program._cache_size() == compiled


def test_published_weights_count_from_the_next_call(model):
    engine = engine_of(model)
    before = engine.generate(PROMPTS, GREEDY, jax.random.key(0))
    engine.publish(jax.tree.map(lambda x: -x, model.params), 7)
    after = engine.generate(PROMPTS, GREEDY, jax.random.key(0))
    assert not same(before, after)
    assert {c.weights_version for c in before} == {0}
    assert {c.weights_version for c in after} == {7}


@pytest.mark.parametrize(
    "mesh_config",
    [MeshConfig(data=8, fsdp=1), MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(fsdp=1, context=2, tensor=4)],
    ids=str,
)
def test_any_mesh_gives_the_same_greedy_tokens(model, engine, mesh_config):
    mesh = make_mesh(mesh_config)
    spread = dataclasses.replace(
        model, constrain=constrain_fn(mesh), row_shards=num_row_shards(mesh), mesh=collectives(mesh)
    )
    found = engine_of(spread, slots=8).generate(PROMPTS, GREEDY, jax.random.key(0))
    assert same(found, engine.generate(PROMPTS, GREEDY, jax.random.key(0)))


@pytest.mark.parametrize(
    ("prompts", "change", "message"),
    [
        ([[]], {}, "prompt 0 has 0 tokens"),
        ([[3], [4] * 6], {}, "prompt 1 has 6 tokens: 1 to data.max_prompt_length = 5"),
        ([[VOCAB]], {}, f"outside the model's vocabulary of {VOCAB}"),
        ([[3]], {"max_new_tokens": 7}, "max_new_tokens = 7: 1 to data.max_response_length = 6"),
        ([[3]], {"max_new_tokens": 0}, "max_new_tokens = 0"),
    ],
)
def test_what_does_not_fit_is_refused(engine, prompts, change, message):
    with pytest.raises(UserError, match=message):
        engine.generate(prompts, dataclasses.replace(SAMPLED, **change), jax.random.key(0))


def test_as_many_log_probabilities_as_tokens():
    with pytest.raises(ValueError, match="2 tokens with 3 log-probabilities"):
        Completion(np.int32([5, 2]), np.float32([0, 0, 0]), "stop", 0)
