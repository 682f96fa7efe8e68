"""The picture beside the metrics: reward, KL with its target, coefficient, accuracy, entropy and length by step."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxppo.config import KLControlConfig
from jaxppo.run.metrics import read_metrics

PANELS = (
    ("mean score", "critic/score/mean"),
    ("KL to the reference (nats per token)", "actor/reward_kl_penalty"),
    ("KL coefficient", "actor/reward_kl_penalty_coeff"),
    ("held-out accuracy", "val-core/"),
    ("entropy (nats per token)", "actor/entropy"),
    ("response length (tokens)", "response_length/mean"),
)
"""Titles, and the metric that is shown; with a slash at its end, all metrics below it."""


def plot_or_say(metrics_file: Path, picture: Path, control: KLControlConfig, say: Callable[[str], None]) -> None:
    """`plot`, where a failure is a line: no picture is worth a run."""
    try:
        plot(metrics_file, picture, control)
    except Exception as error:  # matplotlib raises anything
        say(f"{picture}: not drawn ({type(error).__name__}: {error})")


def plot(metrics_file: Path, picture: Path, control: KLControlConfig) -> None:
    """Writes a PNG of six panels; a metric that the run does not have leaves its panel empty."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lines = read_metrics(metrics_file)
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 6.5))
    # matplotlib's automatic layouts take longer than the whole drawing
    figure.subplots_adjust(left=0.05, right=0.98, bottom=0.08, top=0.94, wspace=0.22, hspace=0.32)
    for axis, (title, metric) in zip(axes.flat, PANELS, strict=True):
        for name, points in curves(lines, metric).items():
            axis.plot(*zip(*points, strict=True), marker="o" if metric.endswith("/") else "", label=name)
            if metric.endswith("/"):
                axis.legend(fontsize="small")
        if metric == "actor/reward_kl_penalty" and control.type == "adaptive":
            axis.axhline(control.target_kl, linestyle="--", color="gray", label="target")
            axis.legend(fontsize="small")
        axis.set(title=title, xlabel="PPO step")
        axis.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def curves(lines: Iterable[Mapping[str, Any]], metric: str) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of a metric, or of each below it ("val-core/"); lines without it or with null are left out."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, x in line.items():
            if x is not None and (name.startswith(metric) if metric.endswith("/") else name == metric):
                found.setdefault(name, []).append((line["step"], x))
    return found
