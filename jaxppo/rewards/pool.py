"""Worker processes, each with a pipe of its own, that score samples: a failing sample costs itself and its worker.

Workers report each sample as it is done, so the run knows which one was at work when a worker died or took too long:
that one is charged (and tried again reward.retries times), the others of its list go elsewhere. Where several were at
work, in the async and batched forms, each is tried alone first. Which worker gets which samples is left open, and what
a function keeps in its module lives as long as the worker: scores that depend on such state depend on chance.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from multiprocessing.connection import wait

from jaxppo.config import ConfigError, RewardConfig, UserError
from jaxppo.rewards.calling import REASON_LENGTH, Form, Outcome, Sample, timed_out, to_outcome
from jaxppo.rewards.worker import OUT_OF_MEMORY

LONGEST_LIST = 64
"""Samples that a worker gets at a time."""
START_S = 300.0
"""The longest import of a user's file."""
GRACE_S = 2.0
"""For a worker to report its async function's time-outs itself."""
HOPELESS = 32
"""So many failures and not one score: the function is broken, and to wait for every time-out is no use."""
LONGEST_MESSAGE = 1 << 20
LOST = (EOFError, OSError, ValueError, TypeError, KeyError)
"""No message, or none that a worker sends: what runs over there may have written anything."""


class WorkerPool:
    """reward.num_workers processes for the whole run. Raises ConfigError where they cannot load the function."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._workers: list[_Worker] = []
        self.close = weakref.finalize(self, _end_all, self._workers)
        try:
            for _ in range(config.num_workers):
                self._workers.append(_Worker(config))
            while any(worker.form is None for worker in self._workers):
                self._hear(None)
        except BaseException:
            self.close()
            raise

    def run(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Outcomes in the samples' order. Raises UserError where the function fails whatever it is given."""
        batch = _Batch(samples, self._config.retries)
        try:
            while len(batch.outcomes) < len(samples):
                for worker in list(self._workers):
                    if worker.form is not None and not worker.unfinished:
                        self._give(worker, batch)
                self._hear(batch)
        except BaseException:
            self.close()  # a worker still busy would report into the next batch
            raise
        return [batch.outcomes[i] for i in range(len(samples))]

    def _give(self, worker: "_Worker", batch: "_Batch") -> None:
        assert worker.form is not None
        if worker.connection.poll():  # nothing is due from it: it ended while it had nothing to do
            self._replace(worker)
        elif indices := batch.take(worker.form, len(self._workers)):
            try:
                worker.give(indices, batch.samples, self._patience(worker))
            except OSError:
                batch.fresh.extendleft(reversed(indices))
                self._replace(worker)

    def _hear(self, batch: "_Batch | None") -> None:
        """Waits for reports, deaths or the next deadline, and sees to them."""
        busy = {w.connection: w for w in self._workers if w.form is None or w.unfinished}
        until = min((w.deadline for w in busy.values()), default=0.0)
        ready = wait(list(busy), max(0.0, until - time.monotonic()))
        for connection, worker in busy.items():
            if connection in ready and worker.form is None:
                worker.start()
            elif connection in ready and batch is not None:
                self._take_reports(worker, batch)
            elif worker.deadline <= time.monotonic():
                if worker.form is None or batch is None:
                    raise UserError(
                        f"reward.function = {self._config.function}: no worker could load it in {START_S} s"
                    )
                self._lose(worker, batch, timed_out(self._config.timeout_s))

    def _take_reports(self, worker: "_Worker", batch: "_Batch") -> None:
        try:
            while worker.unfinished and worker.connection.poll():
                batch.settle(*worker.report())
                worker.deadline = time.monotonic() + self._patience(worker)
        except LOST:
            self._lose(worker, batch, None)

    def _lose(self, worker: "_Worker", batch: "_Batch", outcome: Outcome | None) -> None:
        """Charges who was at work; None is a crash, whose exit status is known once the worker is replaced."""
        status = self._replace(worker)
        if outcome is None:
            memory = f"more memory than reward.memory_gb = {self._config.memory_gb:g}"
            outcome = Outcome(failure="crashes", reason=memory if status == OUT_OF_MEMORY else _describe(status))
        suspects = worker.unfinished[:1] if worker.form == "single" else worker.unfinished
        batch.fresh.extendleft(reversed(worker.unfinished[len(suspects) :]))
        if len(suspects) == 1:
            batch.settle(suspects[0], outcome)
        else:
            batch.alone.extend(suspects)

    def _replace(self, worker: "_Worker") -> int:
        """The exit status of the old one."""
        status = worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self._config)
        return status

    def _patience(self, worker: "_Worker") -> float:
        return self._config.timeout_s + (GRACE_S if worker.form == "async" else 0.0)


class _Worker:
    """A process, and the samples that it was given and has not reported yet."""

    def __init__(self, config: RewardConfig) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxppo.rewards.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
            start_new_session=True,  # it leads a group: Ctrl-C does not reach it, and its children end with it
        )
        theirs.close()
        self.connection.send((config.function, config.timeout_s, int(config.memory_gb * 2**30)))
        self.function = config.function
        self.form: Form | None = None  # until it has loaded the function
        self.given: list[int] = []
        self.unfinished: list[int] = []
        self.deadline = time.monotonic() + START_S

    def start(self) -> None:
        """Its first message. Raises ConfigError where it cannot load the function."""
        try:
            message = json.loads(self.connection.recv_bytes(LONGEST_MESSAGE))
        except LOST:
            raise ConfigError(
                f"reward.function = {self.function}: a worker ended before it had loaded it ({_describe(self.end())})"
            ) from None
        if "error" in message:
            raise ConfigError(message["error"])
        self.form = message["form"]

    def give(self, indices: list[int], samples: Sequence[Sample], timeout_s: float) -> None:
        self.given, self.unfinished = indices, list(indices)
        self.deadline = time.monotonic() + timeout_s
        self.connection.send([samples[i] for i in indices])

    def report(self) -> tuple[int, Outcome]:
        """The next sample's index and outcome. Raises one of LOST where there is none."""
        i, score, further, failure, reason = json.loads(self.connection.recv_bytes(LONGEST_MESSAGE))
        index = dict(enumerate(self.given))[i]
        self.unfinished.remove(index)
        if failure is None:
            return index, to_outcome({**further, "score": score})
        return index, Outcome(failure="timeouts" if failure == "timeouts" else "errors", reason=reason[:REASON_LENGTH])

    def end(self) -> int:
        """Kills its group, whether or not it has ended by itself; its exit status."""
        if self.process.returncode is None:  # until it is waited for, the number is its own
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


class _Batch:
    """Which samples wait, and which are done."""

    def __init__(self, samples: Sequence[Sample], retries: int) -> None:
        self.samples, self.retries = samples, retries
        self.outcomes: dict[int, Outcome] = {}
        self.fresh = deque(range(len(samples)))
        self.alone: deque[int] = deque()
        """To be tried without company."""
        self._failures: Counter[int] = Counter()
        self._scored = False

    def take(self, form: Form, workers: int) -> list[int]:
        """Long lists first and short ones at the end, so that the workers finish together; a batch is one list."""
        if not self.fresh:
            return [self.alone.popleft()] if self.alone else []
        count = len(self.fresh) if form == "batch" else max(1, min(LONGEST_LIST, len(self.fresh) // (2 * workers)))
        return [self.fresh.popleft() for _ in range(count)]

    def settle(self, index: int, outcome: Outcome) -> None:
        """Keeps the outcome, unless it is a failure to be retried."""
        if outcome.failure is None:
            self._scored = True
        else:
            self._failures[index] += 1
            if not self._scored and self._failures.total() >= HOPELESS:
                raise UserError(f"reward.function failed {HOPELESS} times and never gave a score: {outcome.reason}")
            if self._failures[index] <= self.retries:
                return self.alone.append(index)
        self.outcomes[index] = outcome
        return None


def _describe(status: int) -> str:
    return f"its process ended with status {status}" if status >= 0 else f"its process died of signal {-status}"


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()
