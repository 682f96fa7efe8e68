"""Scores of the current policy on held-out prompts: all of them, greedy unless the config says otherwise."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxppo.data.chat import decode
from jaxppo.data.prompts import Prompt
from jaxppo.rewards.calling import Sample as RewardSample
from jaxppo.rewards.scoring import Reward, Scores
from jaxppo.rollout.engine import Completion, Engine, Sampling
from jaxppo.run.metrics import Metrics
from jaxppo.run.validation_metrics import validation_metrics


@dataclasses.dataclass(frozen=True)
class Sample:
    """A completion for people to read."""

    prompt: str
    response: str
    score: float


def score_completions(
    tokenizer, reward: Reward, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> tuple[list[str], Scores]:
    """Texts and scores of completions; `prompts` repeats each prompt for each of its completions."""
    texts = [decode(tokenizer, completion.tokens.tolist()) for completion in completions]
    samples = [
        RewardSample(prompt.data_source, text, prompt.ground_truth, prompt.extra_info)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return texts, reward.score(samples)


def validate(
    engine: Engine,
    tokenizer,
    reward: Reward,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    key: jax.Array,
    show: int,
) -> tuple[Metrics, list[Sample]]:
    """verl's val-core/{source}/acc/* and val-aux/*, over exactly the given prompts, and `show` samples.

    `acc` is what the reward function returns by that name, or else the score; the score is then `reward`.
    """
    completions = engine.generate([p.tokens for p in prompts], sampling, key)
    repeated = [p for p in prompts for _ in range(sampling.n)]
    texts, scores = score_completions(tokenizer, reward, repeated, completions)
    sources = np.array([p.data_source for p in repeated])
    lengths = np.array([len(c.tokens) for c in completions])
    truncated = np.array([c.finish_reason == "length" for c in completions])
    numbers = {name.removeprefix("reward/"): x for name, x in scores.metrics.items()}
    numbers |= {"reward" if "acc" in numbers else "acc": scores.scores}
    metrics = validation_metrics(sources, numbers, scores.preds, sampling.n)
    for source in sorted(set(sources.tolist())):
        here = sources == source
        metrics[f"val-aux/{source}/response_length/mean"] = float(lengths[here].mean())
        metrics[f"val-aux/{source}/response_length/clip_ratio"] = float(truncated[here].mean())
    metrics["val-aux/num_prompts"] = float(len(prompts))
    metrics["val-aux/reward_errors"] = float(sum(error is not None for error in scores.errors))
    chosen = np.linspace(0, len(repeated) - 1, min(show, len(repeated)), dtype=int).tolist()
    samples = [Sample(repeated[i].text, texts[i], float(scores.scores[i])) for i in chosen]
    return metrics, samples


def accuracy_summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """The mean over data sources of the core metric before the first step and at the last validation.

    Example: "accuracy before 0.3700  after 0.9100" from the lines of a metrics.jsonl.
    """
    accuracy = {}
    for line in lines:
        if core := [x for name, x in line.items() if name.startswith("val-core/") and "/acc/mean@" in name]:
            accuracy["after" if line["step"] else "before"] = float(np.mean(core))
    return "accuracy " + ("  ".join(f"{when} {x:.4f}" for when, x in accuracy.items()) or "not measured")
