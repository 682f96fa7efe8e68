"""Scores of a batch, in worker processes or here: a failing sample costs itself, never the run."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxppo.config import RewardConfig, UserError
from jaxppo.rewards.calling import Caller, Failure, Outcome, Sample
from jaxppo.rewards.functions import IN_PROCESS, load_function
from jaxppo.rewards.pool import WorkerPool

FAILURES: tuple[Failure, ...] = ("errors", "timeouts", "crashes")
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of N samples."""

    scores: np.ndarray
    """[N] float32; reward.error_score where the function failed."""
    errors: list[str | None]
    metrics: dict[str, np.ndarray]
    """reward/NAME of each further number that the function returned, over the samples that have it."""
    failures: dict[str, float]
    """reward/errors, reward/timeouts and reward/crashes: how many samples each has cost."""


class Reward:
    """The configured function, loaded once for the run. Raises ConfigError where it cannot be."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        here = config.function in IN_PROCESS or config.num_workers == 0
        self._caller = Caller(load_function(config.function), config.timeout_s) if here else None
        self._pool = None if here else WorkerPool(config)

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Each sample's score. One whose function fails, or gives no finite float32, has reward.error_score.

        Raises UserError where every sample fails: then the function is broken, not a sample.
        """
        outcomes = self._run(samples)
        failed = [outcome for outcome in outcomes if outcome.failure is not None]
        if failed:
            message = (
                f"reward.function = {self._config.function} failed for {len(failed)} of {len(samples)} samples; "
                f"the first: {failed[0].reason}"
            )
            if len(failed) == len(samples):
                raise UserError(message)
            logger.warning(message)
        metrics: dict[str, list[float]] = {}
        for outcome in outcomes:
            for key, value in outcome.further.items():
                metrics.setdefault(f"reward/{key}", []).append(value)
        counts = Counter(outcome.failure for outcome in failed)
        return Scores(
            np.array([self._config.error_score if o.failure else o.score for o in outcomes], np.float32),
            [outcome.reason if outcome.failure else None for outcome in outcomes],
            {key: np.array(values) for key, values in metrics.items()},
            {f"reward/{failure}": float(counts[failure]) for failure in FAILURES},
        )

    def close(self) -> None:
        """Ends the workers."""
        if self._pool is not None:
            self._pool.close()

    def _run(self, samples: Sequence[Sample]) -> list[Outcome]:
        if self._caller is None:
            assert self._pool is not None
            return self._pool.run(samples)
        outcomes: dict[int, Outcome] = {}
        self._caller.run(samples, outcomes.__setitem__)
        return [outcomes[i] for i in range(len(samples))]
