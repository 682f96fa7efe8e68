"""What n responses to each validation prompt say: their mean, the best and the worst of k, the majority of k.

verl's names and estimates: of k responses drawn with replacement, 1,000 times with one fixed seed; the mean and the
standard deviation over the draws, each averaged over prompts. k is 2, 4, 8, ... below n, and n itself.
"""

from collections.abc import Sequence

import numpy as np

from jaxppo.run.metrics import Metrics

DRAWS, SEED = 1000, 42


def sizes(n: int) -> list[int]:
    """Example: 2, 4, 8, 12 for n = 12; none for n = 1."""
    return [2**i for i in range(1, 31) if 2**i < n] + [n] * (n > 1)


def prompt_statistics(values: np.ndarray, preds: Sequence[str] | None) -> Metrics:
    """Of one number of each response [prompts, n] and, where they are known, the answers that were given, prompt by
    prompt: mean@n, and for n > 1 std@n, best@k, worst@k and maj@k with /mean and /std.

    maj@k is the number of the most frequent answer's first response; of equally frequent ones the first drawn.
    """
    n = values.shape[1]
    metrics = {f"mean@{n}": float(values.mean())}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(values.std(axis=1).mean())
    answers = None if preds is None else np.unique(np.array(preds), return_inverse=True)[1].reshape(values.shape)
    for k in sizes(n):
        drawn = np.random.default_rng(SEED).integers(0, n, (DRAWS, k))
        found: dict[str, list[np.ndarray]] = {"best": [], "worst": []} | ({} if answers is None else {"maj": []})
        for i, x in enumerate(values):
            found["best"].append(x[drawn].max(axis=1))
            found["worst"].append(x[drawn].min(axis=1))
            if answers is not None:
                found["maj"].append(majority(x[drawn], answers[i][drawn]))
        for name, draws in found.items():
            metrics[f"{name}@{k}/mean"] = float(np.mean([d.mean() for d in draws]))
            metrics[f"{name}@{k}/std"] = float(np.mean([d.std() for d in draws]))
    return metrics


def majority(values: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """[draws, k] each -> [draws]. Example: values 0 1 1, answers 7 5 5 gives 1."""
    votes = (answers[:, :, None] == answers[:, None, :]).sum(axis=2)
    return values[np.arange(len(values)), votes.argmax(axis=1)]


def validation_metrics(
    sources: np.ndarray, numbers: dict[str, np.ndarray], preds: Sequence[str | None], n: int
) -> Metrics:
    """val-core/{source}/acc/{mean,best,maj}@n and the rest below val-aux, for every number [prompts * n].

    `numbers` has `acc`. A number that some response to a source lacks (NaN) is left out there; so is maj@k where an
    answer is not known.
    """
    metrics: Metrics = {}
    for source in sorted(set(sources.tolist())):
        here = sources == source
        answers = [p for p, inside in zip(preds, here, strict=True) if inside and p is not None]
        known = answers if len(answers) == here.sum() else None
        for name, x in numbers.items():
            if not np.isfinite(x[here]).all():
                continue
            for statistic, value in prompt_statistics(x[here].reshape(-1, n).astype(np.float64), known).items():
                is_core = name == "acc" and f"@{n}" in statistic and statistic.startswith(("mean", "best", "maj"))
                is_core &= not statistic.endswith("/std")
                metrics[f"val-{'core' if is_core else 'aux'}/{source}/{name}/{statistic}"] = value
    return metrics
