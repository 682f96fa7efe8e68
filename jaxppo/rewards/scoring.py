"""From the name in the config to scores: a failing sample costs itself, never the run."""

import copy
import dataclasses
import inspect
import logging
import numbers
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxppo.config import ConfigError, UserError, did_you_mean
from jaxppo.rewards import arithmetic, gsm8k
from jaxppo.rewards.custom import load_custom

RewardFunction = Callable[..., Any]
"""(data_source, solution_str, ground_truth, extra_info) -> a number, or a dict with `score` and further numbers."""

BUILT_IN: dict[str, RewardFunction] = {
    "gsm8k": partial(gsm8k.compute_score, mode="robust"),
    "gsm8k_verl": partial(gsm8k.compute_score, mode="verl"),
    "arithmetic": arithmetic.compute_score,
}
FLOAT32_MAX = float(np.finfo(np.float32).max)
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Sample:
    """All that a reward function sees."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of N samples."""

    scores: np.ndarray
    """[N] float32; 0 where the function failed."""
    errors: list[str | None]
    metrics: dict[str, np.ndarray]
    """reward/NAME of each further number that the function returned, over the samples that have it."""


def load_reward(name: str) -> RewardFunction:
    """A built-in function, or one from FILE.py:NAME. Raises ConfigError naming the valid ones."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ".py:" in name:
        return load_custom(name)
    hint = did_you_mean(name, BUILT_IN)
    raise ConfigError(f"reward.function = {name}{hint}: valid are {', '.join(BUILT_IN)} and FILE.py:NAME")


def score_samples(function: RewardFunction, samples: Sequence[Sample]) -> Scores:
    """Each sample's score. One whose function raises, or returns no finite float32, scores 0 and is logged.

    Raises UserError where every sample fails: then the function is broken, not a sample.
    """
    scores = np.zeros(len(samples), np.float32)
    errors: list[str | None] = [None] * len(samples)
    metrics: dict[str, list[float]] = {}
    for i, sample in enumerate(samples):
        try:
            score, further = _call(function, sample)
        except Exception as error:  # whatever a user's function raises
            errors[i] = " ".join(f"{type(error).__name__}: {error}".split())
            continue
        scores[i] = score
        for key, value in further.items():
            metrics.setdefault(f"reward/{key}", []).append(value)
    failed = [error for error in errors if error is not None]
    if failed:
        name = function.__name__ if inspect.isfunction(function) else repr(function)
        message = f"reward.function ({name}) failed for {len(failed)} of {len(samples)} samples; the first: {failed[0]}"
        if len(failed) == len(samples):
            raise UserError(message)
        logger.warning(message)
    return Scores(scores, errors, {key: np.array(values) for key, values in metrics.items()})


def _call(function: RewardFunction, sample: Sample) -> tuple[float, dict[str, float]]:
    result = function(
        data_source=sample.data_source,
        solution_str=sample.solution_str,
        ground_truth=copy.deepcopy(sample.ground_truth),
        extra_info=copy.deepcopy(sample.extra_info),
    )
    further = {}
    if isinstance(result, dict):
        further = {key: float(value) for key, value in result.items() if key != "score" and _is_number(value)}
        result = result["score"]
    if not _is_number(result) or not abs(result) <= FLOAT32_MAX:
        raise ValueError(f"the score is {result!r}, not a finite number in float32")
    return float(result), further


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real | np.number | np.bool_)
