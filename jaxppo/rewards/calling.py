"""Calls of a reward function, in any of its three forms: what one sample does costs that sample alone.

    def compute_score(data_source, solution_str, ground_truth, extra_info)            one sample
    async def compute_score(data_source, solution_str, ground_truth, extra_info)      many samples at a time
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos)        a list of scores for lists

A score is a number, or a dict with `score`, further numbers, and the answer that was read as `pred`.
Nothing here imports NumPy or jax: workers start fast.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

FLOAT32_MAX = 3.4028234663852886e38
REASON_LENGTH = 500
"""Characters of a failure's reason that are kept."""
PRED_LENGTH = 200
"""Characters of a `pred` by which answers are told apart."""

Form = Literal["single", "async", "batch"]
Failure = Literal["errors", "timeouts", "crashes"]


@dataclasses.dataclass(frozen=True)
class Sample:
    """All that a reward function sees."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one sample: a score with further numbers, or a failure with its reason."""

    score: float = 0.0
    further: dict[str, float] = dataclasses.field(default_factory=dict)
    pred: str | None = None
    """The answer that was read in the response, for maj@k."""
    failure: Failure | None = None
    reason: str = ""


Report = Callable[[int, Outcome], None]
"""Called with a sample's position and its outcome as soon as it is there."""


def form_of(function: Callable[..., Any]) -> Form:
    """Told by the names of the parameters, and by `async`."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have none
        return "single"
    if "solution_strs" in parameters:
        return "batch"
    return "async" if inspect.iscoroutinefunction(function) else "single"


class Caller:
    """A function with the one event loop that its async form keeps, so that its sessions outlive a call."""

    def __init__(self, function: Callable[..., Any], timeout_s: float) -> None:
        self.function, self.timeout_s = function, timeout_s
        self.form = form_of(function)
        self._runner = None
        if self.form == "async":
            import asyncio  # here, since few functions need it

            self._runner = asyncio.Runner()

    def run(self, samples: Sequence[Sample], report: Report) -> None:
        """Reports every sample once. Raises MemoryError alone, after which a process is better thrown away."""
        if self._runner is not None:
            self._runner.run(self._gather(samples, report))
        elif self.form == "batch":
            self._run_batch(samples, report)
        else:
            for i, sample in enumerate(samples):
                report(i, guarded(lambda sample=sample: self.function(**_arguments(sample))))

    def _run_batch(self, samples: Sequence[Sample], report: Report) -> None:
        """The whole batch in one call; where that fails, each sample as a batch of its own."""
        arguments = [_arguments(sample) for sample in samples]
        try:
            results = list(self.function(**{f"{_PLURAL[name]}": [a[name] for a in arguments] for name in _PLURAL}))
            if len(results) != len(samples):
                raise ValueError(f"{len(results)} scores for {len(samples)} samples")
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # whatever a user's function raises
            if len(samples) == 1:
                return report(0, failed(error))
            for i, sample in enumerate(samples):
                self._run_batch([sample], lambda _, outcome, i=i: report(i, outcome))
        else:
            for i, result in enumerate(results):
                report(i, guarded(lambda result=result: result))

    async def _gather(self, samples: Sequence[Sample], report: Report) -> None:
        import asyncio

        async def one(i: int, sample: Sample) -> None:
            try:
                result = await asyncio.wait_for(self.function(**_arguments(sample)), self.timeout_s)
            except TimeoutError:
                report(i, timed_out(self.timeout_s))
            except MemoryError:
                raise
            except (Exception, SystemExit) as error:  # whatever a user's function raises
                report(i, failed(error))
            else:
                report(i, guarded(lambda: result))

        await asyncio.gather(*(one(i, sample) for i, sample in enumerate(samples)))


def guarded(call: Callable[[], Any]) -> Outcome:
    """The outcome of a call, or of its failure."""
    try:
        return to_outcome(call())
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        return failed(error)


def to_outcome(result: Any) -> Outcome:
    """Raises ValueError where the score is no finite float32. Further values are kept where they are finite numbers."""
    score, further, pred = result, {}, None
    if isinstance(result, dict):
        if "score" not in result:
            raise ValueError(f"the dict has no score; its keys are {', '.join(map(str, result))}")
        score = result["score"]
        further = {str(key): float(x) for key, x in result.items() if key not in ("score", "pred") and _is_finite(x)}
        pred = str(result["pred"])[:PRED_LENGTH] if result.get("pred") is not None else None
    if not _is_finite(score):
        raise ValueError(f"the score is {score!r}, not a finite number in float32")
    return Outcome(float(score), further, pred)


def failed(error: BaseException) -> Outcome:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return Outcome(failure="errors", reason=reason[:REASON_LENGTH])


def timed_out(timeout_s: float) -> Outcome:
    return Outcome(failure="timeouts", reason=f"longer than reward.timeout_s = {timeout_s:g}")


_PLURAL = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}


def _arguments(sample: Sample) -> dict[str, Any]:
    """Copies: the samples of one prompt share what their row holds."""
    return {
        "data_source": sample.data_source,
        "solution_str": sample.solution_str,
        "ground_truth": copy.deepcopy(sample.ground_truth),
        "extra_info": copy.deepcopy(sample.extra_info),
    }


def _is_finite(value: Any) -> bool:
    """Whether it is a number (also NumPy's or a tensor of one element) that float32 holds."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return False
    try:
        return abs(float(value)) <= FLOAT32_MAX
    except (OverflowError, TypeError, ValueError):  # 10**400, an array of many elements
        return False
