"""What a run writes down: one JSON object a step, verl's names, and a line for people."""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxppo.config import UserError
from jaxppo.rollout.engine import Completion
from jaxppo.run.compiling import compile_clock
from jaxppo.run.memory import memory_metrics

Metrics = dict[str, float]


class Stopwatch:
    """Seconds by phase, and the GPU's memory at its end: `with watch("gen"): ...` gives timing_s/gen.

    What jax compiles meanwhile is a phase of its own, timing_s/compile.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"compile": 0.0}
        self.memory: Metrics = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        clock, start = compile_clock(), time.perf_counter()
        compiled = -clock.seconds
        yield
        elapsed = time.perf_counter() - start
        compiled += clock.seconds
        self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed - compiled
        self.seconds["compile"] += compiled
        self.memory |= memory_metrics(phase)

    def metrics(self) -> Metrics:
        """timing_s/* of each phase and of the whole step so far."""
        phases = self.seconds | {"step": time.perf_counter() - self._start}
        return {f"timing_s/{phase}": seconds for phase, seconds in phases.items()}


def rollout_metrics(
    prompt_lengths: Sequence[int],
    completions: Sequence[Completion],
    scores: np.ndarray,
    limits: tuple[int, int],
) -> Metrics:
    """Scores and lengths (tokens) of a batch; `limits` are the greatest prompt and response lengths."""
    responses = np.array([len(c.tokens) for c in completions])
    prompts = np.array(prompt_lengths)
    truncated = np.array([c.finish_reason == "length" for c in completions])
    metrics: Metrics = {}
    for name, x in {"critic/score": scores, "response_length": responses, "prompt_length": prompts}.items():
        metrics |= {f"{name}/{key}": float(f(x)) for key, f in (("mean", np.mean), ("max", np.max), ("min", np.min))}
    metrics["response_length/clip_ratio"] = float(truncated.mean())
    metrics["prompt_length/clip_ratio"] = float((prompts >= limits[0]).mean())
    return metrics


def performance_metrics(timing: Metrics, prompt_tokens: int, response_tokens: int, devices: int) -> Metrics:
    """Tokens per second and device over the step without compilation, and milliseconds per token of its phases."""
    total = prompt_tokens + response_tokens
    seconds = timing["timing_s/step"] - timing["timing_s/compile"]
    metrics = {
        "perf/total_num_tokens": float(total),
        "perf/time_per_step": seconds,
        "perf/throughput": total / (seconds * devices),
    }
    for phase, tokens in {"gen": response_tokens, "score": total, "update": total}.items():
        metrics[f"timing_per_token_ms/{phase}"] = 1e3 * timing[f"timing_s/{phase}"] / tokens
    return metrics


class MetricsFile:
    """metrics.jsonl: a line a step, in order, each step once, also over a resume or a kill in mid-line."""

    def __init__(self, path: Path | None, resumed: Mapping[str, Any] | None) -> None:
        """`resumed` is the line of the checkpoint's step: the file ends with it. None, for a new run, empties it.

        Without a path nothing is written: one process of a run writes for all. Raises UserError where it cannot.
        """
        self.path = path
        if path is None:
            return
        kept = []
        if resumed is not None:
            before = read_metrics(path) if path.exists() else []
            kept = [*(line for line in before if line["step"] < resumed["step"]), resumed]
        write_file(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a")

    def write(self, line: Mapping[str, Any]) -> None:
        """At once. Raises UserError where the disk is full."""
        if self.path is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror})") from None

    def read(self) -> list[dict[str, Any]]:
        """The lines so far."""
        return [] if self.path is None else read_metrics(self.path)

    def close(self) -> None:
        if self.path is None:
            return
        with contextlib.suppress(OSError):  # what `write` could not write, it has told
            self._file.close()


def write_file(path: Path, text: str) -> None:
    """The whole text or, after a kill, the old file. Raises UserError where it cannot be written."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def to_line(step: int, metrics: Metrics) -> dict[str, Any]:
    """A step's line: the step first, then names in order. Numbers that are not finite become None: JSON has none."""
    return {"step": step} | {name: x if math.isfinite(x) else None for name, x in sorted(metrics.items())}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics.jsonl."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break  # the process was killed while it wrote this line
    return lines
