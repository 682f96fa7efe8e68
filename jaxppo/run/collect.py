"""Responses to learn from: sampled, scored, and with dynamic sampling only those of prompts that tell something."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from jaxppo.config import Config, RewardConfig, UserError
from jaxppo.data.prompts import Prompt
from jaxppo.rollout.engine import Completion
from jaxppo.run.learning import generate
from jaxppo.run.metrics import Metrics, Stopwatch, rollout_metrics
from jaxppo.run.setup import Run
from jaxppo.run.validation import score_completions
from jaxppo.step.packing import Rollout


@dataclasses.dataclass(frozen=True)
class Response:
    """One of a prompt's rollout.n responses."""

    prompt: Prompt
    completion: Completion
    score: float
    """As the reward function gave it."""
    further: dict[str, float]
    """reward/NAME of each further number that it gave."""
    baseline: float = 0.0
    """Shaped score of the prompt's greedy response; 0 where none was sampled."""


def collect(run: Run, key: jax.Array, watch: Stopwatch) -> tuple[list[Response], Metrics]:
    """rollout.n responses to each of data.train_batch_size prompts, prompt by prompt, and how they came about.

    With algorithm.filter_groups a group whose responses are all as good as each other is dropped, since no comparison
    can learn from it, and further prompts are taken until the batch is full: DAPO's dynamic sampling (Yu et al. 2025,
    section 3.2). Whole batches are sampled, so that nothing recompiles; what is too much is dropped. Raises UserError
    where max_num_gen_batches do not fill one. The engine sleeps afterwards.
    """
    rule, wanted = run.config.algorithm.filter_groups, run.config.sequences_per_step
    if not rule.enable:
        return _sample(run, key, watch, last=True)
    kept: list[Response] = []
    batches, metrics = 0, {"train/dropped_groups": 0.0}
    while len(kept) < wanted:
        if batches and batches == rule.max_num_gen_batches:
            raise UserError(
                f"algorithm.filter_groups.max_num_gen_batches = {batches}: so many batches of "
                f"data.train_batch_size = {run.config.data.train_batch_size} prompts gave only "
                f"{len(kept) // run.config.rollout.n} whose responses differ in {rule.metric}; valid is a greater "
                "number, 0 for no bound, or prompts that are neither too hard nor too easy"
            )
        # step keys 1 and 2 are validation's and the update's
        draw = key if batches == 0 else jax.random.fold_in(key, 2 + batches)
        responses, counts = _sample(run, draw, watch, last=False)
        groups = [responses[i : i + run.config.rollout.n] for i in range(0, len(responses), run.config.rollout.n)]
        telling = [group for group in groups if _differs(group, rule.metric)]
        kept += itertools.chain(*telling)
        counts["train/dropped_groups"] = float(len(groups) - len(telling))
        metrics |= {name: metrics.get(name, 0.0) + x for name, x in counts.items()}
        batches += 1
    with watch("sleep"):
        run.engine.sleep()
    return kept[:wanted], metrics | {"train/num_gen_batches": float(batches)}


def make_rollouts(responses: Sequence[Response], config: Config) -> list[Rollout]:
    """Sequences with shaped scores, rollout.n for each prompt; truncated ones by reward.truncated."""
    return [
        Rollout(
            np.asarray(r.prompt.tokens, np.int32),
            r.completion.tokens,
            r.completion.logprobs,
            shaped_score(r.score, r.completion, config),
            in_loss=not (r.completion.finish_reason == "length" and config.reward.truncated == "mask"),
            group=i // config.rollout.n,
            baseline=r.baseline,
        )
        for i, r in enumerate(responses)
    ]


def response_metrics(responses: Sequence[Response], config: Config) -> Metrics:
    """Lengths, scores as the reward function gave them, and the means of all else that it gave."""
    completions = [r.completion for r in responses]
    metrics = rollout_metrics(
        [len(r.prompt.tokens) for r in responses],
        completions,
        np.array([r.score for r in responses], np.float32),
        (config.data.max_prompt_length, config.data.max_response_length),
    )
    for name in responses[0].further:
        values = np.array([r.further[name] for r in responses])
        metrics[name] = float(np.mean(values[np.isfinite(values)]))
    if config.reward.overlong_buffer.enable:
        limit = config.data.max_response_length
        penalties = [overlong_penalty(len(c.tokens), limit, config.reward) for c in completions]
        metrics["reward/overlong_penalty"] = float(np.mean(penalties))
    if config.algorithm.adv_estimator == "remax":
        metrics["reward/greedy_baseline"] = float(np.mean([r.baseline for r in responses]))
    return metrics


def shaped_score(score: float, completion: Completion, config: Config) -> float:
    """The score that is learned from: 0 for a truncated response where reward.truncated says so, and the penalty."""
    cut = completion.finish_reason == "length"
    kept = 0.0 if cut and config.reward.truncated == "zero" else score
    return kept + overlong_penalty(len(completion.tokens), config.data.max_response_length, config.reward)


def overlong_penalty(length: int, limit: int, config: RewardConfig) -> float:
    """0 up to limit - len tokens, then falling in a line to -penalty_factor at the limit; 0 where it is off.

    Example: limit 100, len 20, penalty_factor 1: 0 at 80 tokens, -0.5 at 90, -1 at 100. Yu et al. 2025, DAPO, eq. 13.
    """
    buffer = config.overlong_buffer
    if not buffer.enable:
        return 0.0
    return -buffer.penalty_factor * max(length - (limit - buffer.len), 0) / buffer.len


def _sample(run: Run, key: jax.Array, watch: Stopwatch, *, last: bool) -> tuple[list[Response], Metrics]:
    """The responses to the loader's next batch. The engine sleeps before they are scored if they are the `last`."""
    config, prompts = run.config, next(run.loader)
    tokens = [prompt.tokens for prompt in prompts]
    with watch("gen"):
        completions = generate(run, tokens, run.sampling, jax.random.fold_in(key, 0))
    greedy: list[Completion] = []
    if config.algorithm.adv_estimator == "remax":
        greedily = dataclasses.replace(run.sampling, temperature=0.0, top_k=-1, top_p=1.0, n=1)
        with watch("gen_max"):
            greedy = generate(run, tokens, greedily, key)
    if last:
        with watch("sleep"):
            run.engine.sleep()
    repeated = [prompt for prompt in prompts for _ in range(config.rollout.n)]
    with watch("reward"):
        # one call for all: a pool of workers is best used by many samples
        asked = [*repeated, *prompts] if greedy else repeated
        _, scored = score_completions(run.tokenizer, run.reward, asked, [*completions, *greedy])
    scores = scored.scores.tolist()
    baselines = [shaped_score(s, c, config) for s, c in zip(scores[len(repeated) :], greedy, strict=True)]
    responses = [
        Response(
            prompt,
            completion,
            scores[i],
            {name: float(x[i]) for name, x in scored.metrics.items()},
            baselines[i // config.rollout.n] if greedy else 0.0,
        )
        for i, (prompt, completion) in enumerate(zip(repeated, completions, strict=True))
    ]
    return responses, scored.failures


def _differs(group: Sequence[Response], metric: str) -> bool:
    """Whether a group's responses are not all equal in the metric. Raises UserError where one does not have it."""
    if metric == "score":
        return len({r.score for r in group}) > 1
    name = f"reward/{metric}"
    values = [r.further.get(name, np.nan) for r in group]
    if not np.isfinite(values).all():
        given = ", ".join(["score", *(x.removeprefix("reward/") for x in group[0].further)])
        raise UserError(f"algorithm.filter_groups.metric = {metric}: the reward function gives a sample only {given}")
    return len(set(values)) > 1
