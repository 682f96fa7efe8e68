"""What a person sees: a progress bar with the time left, a line a step, validations and samples."""

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxppo.parallel.distributed import is_first
from jaxppo.run.metrics import Metrics
from jaxppo.run.validation import Sample

FIELDS = (
    ("score", "critic/score/mean", "{:.3f}"),
    ("kl", "actor/reward_kl_penalty", "{:.4f}"),
    ("coef", "actor/reward_kl_penalty_coeff", "{:.4f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("pg", "actor/pg_loss", "{:+.4f}"),
    ("vf", "critic/vf_loss", "{:.4f}"),
    ("length", "response_length/mean", "{:.1f}"),
    ("tok/s", "perf/throughput", "{:,.0f}"),
    ("s", "timing_s/step", "{:.2f}"),
)


class Display:
    """A context: inside it, lines go above the bar; where the output is no terminal there is no bar."""

    def __init__(self, total_steps: int, first_step: int) -> None:
        self._console = Console(soft_wrap=True, highlight=False, quiet=not is_first())
        self._progress = Progress(
            TextColumn("PPO"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("steps", total=total_steps, completed=first_step)
        self._width = len(str(total_steps))

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._console.print(escape(text))

    def step(self, step: int, metrics: Metrics) -> None:
        parts = [f"{name} {form.format(metrics[key])}" for name, key, form in FIELDS if key in metrics]
        self.say(f"step {step:>{self._width}}  " + "  ".join(parts))
        self._progress.update(self._task, completed=step)

    def validation(self, step: int, metrics: Metrics, samples: Sequence[Sample]) -> None:
        core = "  ".join(f"{name} {x:.4f}" for name, x in metrics.items() if name.startswith("val-core/"))
        self.say(f"validation at step {step}: {core}  ({metrics['timing_s/testing']:.1f} s)")
        for sample in samples:
            self.say(f"  [{sample.score:g}] {sample.prompt!r} -> {sample.response!r}")
