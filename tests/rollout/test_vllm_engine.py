"""The order in which weights, caches, memory and requests reach vLLM, on a backend that writes down what it is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.rollout.engine import Completion, Sampling
from jaxppo.rollout.sharing import merge, share, to_arrays
from jaxppo.rollout.vllm_engine import VLLMEngine, request_seeds

SAMPLING = Sampling(temperature=1.0, max_new_tokens=4, eos_ids=(2,), n=2)
PROMPTS = [[5, 6], [7], [8, 9, 10]]


class Recorder:
    """Answers each prompt with the low bits of its seed; refuses buckets that do not hold exactly w and b."""

    def __init__(self):
        self.calls, self.loaded, self.seeds = [], {}, []

    def load(self, buckets, seed):
        self.calls.append("load")
        arrays = {name: x for bucket in buckets for (name,), (x,) in bucket.items()}
        if arrays.keys() != {"w", "b"}:
            raise RuntimeError(f"got {sorted(arrays)}")
        self.loaded = {name: (x.shape, x.dtype, float(x.sum())) for name, x in arrays.items()}

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tag):
        self.calls.append(f"wake {tag}")

    def generate(self, prompts, sampling, seeds, version):
        self.calls.append("generate")
        self.seeds = seeds
        assert len(prompts) == len(seeds)
        return [
            Completion(np.array([p[0], s % 7], np.int32), np.array([-1, -2], np.float32), "length", version)
            for p, s in zip(prompts, seeds, strict=True)
        ]


def make(sleep_level=0):
    recorder = Recorder()
    engine = VLLMEngine(
        recorder,
        lambda params: ({(name,): x[None]} for name, x in params.items()),
        sleep_level=sleep_level,
        engines=1,
        index=0,
    )
    return engine, recorder


def parameters(scale=1.0):
    return {"w": scale * jnp.ones((2, 3)), "b": jnp.zeros(3)}


def test_every_publish_loads_all_then_resets_the_prefix_cache_once():
    engine, recorder = make()
    for step in (1, 2):
        recorder.calls.clear()
        assert engine.publish(parameters(step), step) == 4 * (2 * 3 + 3)
        assert recorder.calls == ["load", "reset_prefix_cache"]
        assert recorder.loaded == {"w": ((2, 3), jnp.float32, 6.0 * step), "b": ((3,), jnp.float32, 0.0)}
        completions = engine.generate(PROMPTS, SAMPLING, jax.random.key(0))
        assert {c.weights_version for c in completions} == {step}
        assert [c.tokens[0] for c in completions] == [5, 5, 7, 7, 8, 8]


def test_responses_before_weights_are_refused():
    engine, _ = make()
    with pytest.raises(RuntimeError, match="before weights"):
        engine.generate(PROMPTS, SAMPLING, jax.random.key(0))


@pytest.mark.parametrize("version", [2, 3])
def test_a_stale_version_is_refused_and_the_engine_stays_as_it_was(version):
    engine, recorder = make()
    engine.publish(parameters(), 3)
    recorder.calls.clear()
    with pytest.raises(ValueError, match=f"version {version} was published, but the engine has version 3"):
        engine.publish(parameters(), version)
    assert recorder.calls == []
    assert engine.generate(PROMPTS, SAMPLING, jax.random.key(0))[0].weights_version == 3


@pytest.mark.parametrize("wrong", [{"w": 1}, {"w": 1, "bias": 1}, {"w": 1, "b": 1, "c": 1}])
def test_after_a_publish_that_failed_nothing_is_sampled(wrong):
    engine, recorder = make()
    engine.publish(parameters(), 1)
    with pytest.raises(RuntimeError, match="got"):
        engine.publish({name: jnp.ones(1) for name in wrong}, 2)
    assert recorder.calls[-1] == "load"
    with pytest.raises(RuntimeError, match="before weights"):
        engine.generate(PROMPTS, SAMPLING, jax.random.key(0))


def test_level_1_wakes_up_for_responses_with_the_weights_it_had():
    engine, recorder = make(sleep_level=1)
    engine.publish(parameters(), 1)
    engine.sleep()
    engine.sleep()
    recorder.calls.clear()
    engine.generate(PROMPTS, SAMPLING, jax.random.key(0))
    engine.generate(PROMPTS, SAMPLING, jax.random.key(0))
    assert recorder.calls == ["wake weights", "wake kv_cache", "generate", "generate"]


def test_level_2_needs_a_publish_and_wakes_the_weights_for_it_alone():
    engine, recorder = make(sleep_level=2)
    engine.publish(parameters(), 1)
    engine.sleep()
    with pytest.raises(RuntimeError, match="before weights"):
        engine.generate(PROMPTS, SAMPLING, jax.random.key(0))
    recorder.calls.clear()
    engine.publish(parameters(), 1)  # the same version: its weights are gone
    assert recorder.calls == ["wake weights", "load", "reset_prefix_cache"]
    engine.generate(PROMPTS, SAMPLING, jax.random.key(0))
    assert recorder.calls[3:] == ["wake kv_cache", "generate"]


def test_level_0_never_sleeps():
    engine, recorder = make()
    engine.sleep()
    assert recorder.calls == []


def test_a_seed_depends_on_key_prompt_and_sample_alone():
    key = jax.random.key(3)
    all_seeds = request_seeds(key, range(5), 2)
    assert len(set(all_seeds)) == 10
    assert all(0 <= seed < 2**63 for seed in all_seeds)
    assert request_seeds(key, [3], 2) == all_seeds[6:8]
    assert request_seeds(key, [3], 1) == all_seeds[6:7]
    assert request_seeds(key, range(5), 2) == all_seeds
    assert not set(request_seeds(jax.random.key(4), range(5), 2)) & set(all_seeds)


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_engines_share_the_prompts_and_every_process_gets_all_answers(engines, n):
    answers = [
        Completion(np.array([i, j, 2][: i % 3 + 1], np.int32), np.full(i % 3 + 1, -0.5 * j, np.float32), reason, 9)
        for i, reason in enumerate(["stop", "length", "stop", "length", "stop"])
        for j in range(n)
    ]
    shares = [[answers[i * n + j] for i in share(5, engines, e) for j in range(n)] for e in range(engines)]
    assert sum(map(len, shares)) == len(answers)
    merged = merge([to_arrays(mine, -(-5 // engines) * n, 4) for mine in shares], 5, n)
    for one, other in zip(merged, answers, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert (one.finish_reason, one.weights_version) == (other.finish_reason, other.weights_version)
