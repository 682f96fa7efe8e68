"""What a step learns from: shaped scores, groups that tell something, and ReMax's greedy baseline."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxppo.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    FilterGroupsConfig,
    OverlongBufferConfig,
    RewardConfig,
    RolloutConfig,
    UserError,
)
from jaxppo.data.loader import PromptLoader
from jaxppo.data.prompts import Prompt
from jaxppo.rewards.scoring import Scores
from jaxppo.rollout.engine import Completion, Sampling
from jaxppo.run.collect import Response, collect, make_rollouts, overlong_penalty, response_metrics
from jaxppo.run.metrics import Stopwatch


def prompt(i: int, *tokens: int) -> Prompt:
    return Prompt(i, tokens or (9, i), f"p{i}", "s", str(i), {})


def completion(tokens: list[int], reason: str) -> Completion:
    return Completion(np.array(tokens, np.int32), -np.arange(len(tokens), dtype=np.float32), reason, 3)


def response(score: float, tokens: list[int], reason: str = "stop") -> Response:
    return Response(prompt(0, 9, 9), completion(tokens, reason), score, {})


@pytest.mark.parametrize(
    ("truncated", "scores", "in_loss"),
    [("keep", [1, 2], [True, True]), ("zero", [1, 0], [True, True]), ("mask", [1, 2], [True, False])],
)
def test_truncated_responses_are_kept_scored_0_or_left_out(truncated, scores, in_loss):
    """A response as long as the limit that ends with EOS is whole."""
    config = Config(reward=RewardConfig(truncated=truncated))
    responses = [response(1.0, [5, 6, 7, 2]), response(2.0, [5, 6, 7, 8], "length")]
    rollouts = make_rollouts(responses, config)
    assert [r.score for r in rollouts] == scores
    assert [r.in_loss for r in rollouts] == in_loss


def test_the_engines_token_ids_go_on_as_they_are():
    """No text in between: ids that a tokenizer would never produce survive, and so do their log-probabilities."""
    given = response(1.0, [40, 41, 40])
    (rollout,) = make_rollouts([given], Config())
    assert rollout.prompt.tolist() == [9, 9]
    assert rollout.response is given.completion.tokens
    assert rollout.logprobs is given.completion.logprobs


@pytest.mark.parametrize(("length", "penalty"), [(1, 0), (80, 0), (81, -0.1), (90, -1), (100, -2)])
def test_the_penalty_on_length_grows_over_the_buffer(length, penalty):
    on = RewardConfig(overlong_buffer=OverlongBufferConfig(enable=True, len=20, penalty_factor=2.0))
    assert overlong_penalty(length, 100, on) == pytest.approx(penalty)
    assert overlong_penalty(length, 100, RewardConfig()) == 0


def test_shaping_is_learned_from_and_not_reported_as_the_score():
    buffer = OverlongBufferConfig(enable=True, len=2, penalty_factor=1.0)
    config = Config(
        data=DataConfig(max_response_length=4), reward=RewardConfig(truncated="zero", overlong_buffer=buffer)
    )
    responses = [response(1.0, [5, 6, 2]), response(1.0, [5, 6, 7, 8], "length")]
    assert [r.score for r in make_rollouts(responses, config)] == [0.5, -1]
    metrics = response_metrics(responses, config)
    assert metrics["critic/score/mean"] == 1
    assert metrics["reward/overlong_penalty"] == -0.75


class World:
    """A run of which only sampling is real: response j to prompt i is [i, j, j + key's call], greedy ones are [i]."""

    def __init__(self, score, n: int = 2, prompts: int = 8, batch: int = 2, **algorithm) -> None:
        self.calls, self.score, self.log = 0, score, []
        self.config = Config(
            data=DataConfig(train_batch_size=batch, max_response_length=4),
            rollout=RolloutConfig(n=n),
            algorithm=AlgorithmConfig(**algorithm),
        )
        loader = PromptLoader([prompt(i) for i in range(prompts)], batch, shuffle=False, seed=0)
        self.run = SimpleNamespace(
            config=self.config,
            loader=loader,
            engine=self,
            tokenizer=self,
            reward=SimpleNamespace(score=self.scores),
            sampling=Sampling(temperature=0.7, top_k=5, n=n, max_new_tokens=4, eos_ids=(2,)),
        )

    def collect(self):
        return collect(self.run, jax.random.key(0), Stopwatch())

    def generate(self, prompts, sampling, key):
        self.log.append((sampling, tuple(jax.random.key_data(key).tolist())))
        if sampling.temperature == 0:
            return [completion([p[-1]], "stop") for p in prompts]
        return [completion([p[-1], j], "stop") for p in prompts for j in range(sampling.n)]

    def sleep(self):
        self.log.append("sleep")

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))

    def scores(self, samples):
        found = [self.score(*map(int, s.solution_str.split())) for s in samples]
        acc = np.array([float(x > 0) for x in found])
        return Scores(
            np.array(found, np.float32),
            [None] * len(found),
            {"reward/acc": acc},
            [None] * len(found),
            {"reward/errors": 1.0},
        )


def test_without_dynamic_sampling_a_batch_is_taken_as_it_is():
    world = World(lambda i, j: 0.0)
    responses, metrics = world.collect()
    assert [(r.prompt.index, *r.completion.tokens.tolist()) for r in responses] == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]
    assert metrics == {"reward/errors": 1.0}
    assert world.log[1:] == ["sleep"]
    assert [r.group for r in make_rollouts(responses, world.config)] == [0, 0, 1, 1]


@pytest.mark.parametrize("metric", ["score", "acc"])
def test_groups_without_signal_are_refilled_from_further_prompts(metric):
    """Of prompts 0 to 5 only 1, 4 and 5 have responses that differ; the third batch is one more than is needed."""
    rule = FilterGroupsConfig(enable=True, metric=metric)
    world = World(lambda i, j: float(j) if i in (1, 4, 5) else 1.0, filter_groups=rule)
    responses, metrics = world.collect()
    assert [r.prompt.index for r in responses] == [1, 1, 4, 4]
    assert metrics == {"train/num_gen_batches": 3.0, "train/dropped_groups": 3.0, "reward/errors": 3.0}
    assert world.log[-1] == "sleep"
    assert world.log.count("sleep") == 1
    assert len({key for _, key in world.log[:-1]}) == 3, "every batch draws from a key of its own"
    assert [p.index for p in next(world.run.loader)] == [6, 7], "a resumed run goes on behind what was taken"


def test_a_metric_that_differs_where_the_score_does_not_decides():
    rule = FilterGroupsConfig(enable=True, metric="acc", max_num_gen_batches=1)
    world = World(lambda i, j: 1.0 + j, filter_groups=rule)
    with pytest.raises(UserError, match=r"filter_groups\.max_num_gen_batches = 1: .* gave only 0 whose .* in acc"):
        world.collect()
    world = World(lambda i, j: 1.0 + j, filter_groups=dataclasses.replace(rule, metric="score"))
    assert len(world.collect()[0]) == 4


def test_an_unknown_metric_is_named_with_those_there_are():
    world = World(lambda i, j: 1.0, filter_groups=FilterGroupsConfig(enable=True, metric="accuracy"))
    with pytest.raises(UserError, match=r"filter_groups\.metric = accuracy: .* only score, acc"):
        world.collect()


def test_remax_is_measured_against_the_greedy_response_of_the_same_prompt():
    world = World(lambda i, j=None: 10.0 + i if j is None else float(j), adv_estimator="remax")
    responses, _ = world.collect()
    assert [(r.score, r.baseline) for r in responses] == [(0, 10), (1, 10), (0, 11), (1, 11)]
    greedy = world.log[1][0]
    assert (greedy.temperature, greedy.n, greedy.top_k, greedy.eos_ids) == (0.0, 1, -1, (2,))
    assert [r.baseline for r in make_rollouts(responses, world.config)] == [10, 10, 11, 11]
    assert response_metrics(responses, world.config)["reward/greedy_baseline"] == 10.5
