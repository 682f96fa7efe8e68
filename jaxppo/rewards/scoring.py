"""Scores of a batch, in worker processes or here: a failing sample costs itself, never the run."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxppo.config import RewardConfig, UserError
from jaxppo.parallel.distributed import share_work
from jaxppo.rewards.calling import Caller, Failure, Outcome, Sample
from jaxppo.rewards.functions import IN_PROCESS, RewardFunction, load_function
from jaxppo.rewards.pool import WorkerPool

FAILURES: tuple[Failure, ...] = ("errors", "timeouts", "crashes")
Run = Callable[[Sequence[Sample]], list[Outcome]]
"""Outcomes in the samples' order."""
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of N samples."""

    scores: np.ndarray
    """[N] float32; reward.error_score where the function failed."""
    errors: list[str | None]
    metrics: dict[str, np.ndarray]
    """reward/NAME -> [N] of each further number that the function returned; NaN where a sample has none."""
    preds: list[str | None]
    """The answer that the function read in each response; None where it says none."""
    failures: dict[str, float]
    """reward/errors, reward/timeouts and reward/crashes: how many samples each has cost."""


class Reward:
    """A function that scores samples, wherever it runs."""

    def __init__(self, config: RewardConfig, run: Run, close: Callable[[], object]) -> None:
        self.close = close
        self._config, self._run = config, run

    def _plain(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        return [dataclasses.asdict(outcome) for outcome in self._run(samples)]

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Each sample's score; every process of the run computes its share.

        One whose function fails, or gives no finite float32, has reward.error_score. Raises UserError where every
        sample fails: then the function is broken, not a sample.
        """
        outcomes = [Outcome(**x) for x in share_work(self._plain, samples)]
        failed = [outcome for outcome in outcomes if outcome.failure is not None]
        if failed:
            message = (
                f"reward.function = {self._config.function} failed for {len(failed)} of {len(samples)} samples; "
                f"the first: {failed[0].reason}"
            )
            if len(failed) == len(samples):
                raise UserError(message)
            logger.warning(message)
        names = dict.fromkeys(name for outcome in outcomes for name in outcome.further)
        counts = Counter(outcome.failure for outcome in failed)
        return Scores(
            np.array([self._config.error_score if o.failure else o.score for o in outcomes], np.float32),
            [outcome.reason if outcome.failure else None for outcome in outcomes],
            {f"reward/{name}": np.array([o.further.get(name, np.nan) for o in outcomes]) for name in names},
            [o.pred for o in outcomes],
            {f"reward/{failure}": float(counts[failure]) for failure in FAILURES},
        )


def open_reward(config: RewardConfig) -> Reward:
    """The configured function, loaded once for the run. Raises ConfigError where it cannot be."""
    if config.function in IN_PROCESS or config.num_workers == 0:
        return Reward(config, run_here(load_function(config.function), config.timeout_s), lambda: None)
    pool = WorkerPool(config)
    return Reward(config, pool.run, pool.close)


def run_here(function: RewardFunction, timeout_s: float) -> Run:
    """Calls in this process: only the async form's time-out holds."""
    caller = Caller(function, timeout_s)

    def run(samples: Sequence[Sample]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        caller.run(samples, outcomes.__setitem__)
        return [outcomes[i] for i in range(len(samples))]

    return run
