"""How long jax has compiled: no part of a step's speed, and after the first steps a sign that something is wrong."""

import functools
import time
from typing import Any

import jax

COMPILING = "/jax/core/compile/"
"""What the names of jax's events of tracing, lowering and compiling start with."""


class CompileClock:
    """Listens to jax's events, each told at its end with its duration; one inside another counts once."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self.compilations = 0
        """Programs that XLA has compiled, or that the compilation cache has had."""

    def __call__(self, event: str, duration_secs: float, **_: Any) -> None:
        self.compilations += event == f"{COMPILING}backend_compile_duration"
        if event.startswith(COMPILING):
            end = time.perf_counter()
            while self._spans and self._spans[-1][0] >= end - duration_secs:
                self._spans.pop()
            self._spans.append((end - duration_secs, end))

    @property
    def seconds(self) -> float:
        """Of the process so far."""
        return sum(end - start for start, end in self._spans)


@functools.cache
def compile_clock() -> CompileClock:
    """The one clock of the process, started at the first call."""
    clock = CompileClock()
    jax.monitoring.register_event_duration_secs_listener(clock)
    return clock
