"""mean@n, best@k, worst@k and maj@k against the exact expectations of their draws."""

import itertools

import numpy as np
import pytest

from jaxppo.run.validation_metrics import majority, prompt_statistics, sizes, validation_metrics


def test_sizes_are_powers_of_two_and_n():
    assert [sizes(n) for n in (1, 2, 3, 8, 12)] == [[], [2], [2, 3], [2, 4, 8], [2, 4, 8, 12]]


def test_one_response_has_a_mean_alone():
    assert prompt_statistics(np.array([[1.0], [0.0]]), None) == {"mean@1": 0.5}


def exact(values: list[float], k: int, f) -> tuple[float, float]:
    """Mean and standard deviation of f over all equally likely draws of k with replacement."""
    outcomes = [f(draw) for draw in itertools.product(range(len(values)), repeat=k)]
    return float(np.mean(outcomes)), float(np.std(outcomes))


def test_the_bootstrap_estimates_the_expectation_over_draws():
    values, preds = [[1.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 1.0]], [["a", "b", "b", "c"], ["x", "x", "x", "x"]]
    found = prompt_statistics(np.array(values), [*preds[0], *preds[1]])
    assert found["mean@4"] == 0.3125
    assert found["std@4"] == pytest.approx(np.std(values, axis=1).mean())

    def vote(row: int, draw: tuple[int, ...]) -> float:
        answers = [preds[row][i] for i in draw]
        winner = max(dict.fromkeys(answers), key=answers.count)
        return values[row][draw[answers.index(winner)]]

    for k in (2, 4):
        for name, f in {
            "best": lambda row, draw: max(values[row][i] for i in draw),
            "worst": lambda row, draw: min(values[row][i] for i in draw),
            "maj": vote,
        }.items():
            pairs = [exact(values[row], k, lambda draw, row=row, f=f: f(row, draw)) for row in (0, 1)]
            mean, std = np.mean(pairs, axis=0)
            assert found[f"{name}@{k}/mean"] == pytest.approx(mean, abs=0.04), (name, k)
            assert found[f"{name}@{k}/std"] == pytest.approx(std, abs=0.04), (name, k)
    assert found == prompt_statistics(np.array(values), [*preds[0], *preds[1]]), "the same figures each time"


def test_of_equal_votes_the_first_drawn_wins():
    assert majority(np.array([[3.0, 4, 5], [3, 4, 5]]), np.array([[1, 2, 0], [1, 2, 2]])).tolist() == [3, 4]


def test_core_and_auxiliary_by_source():
    sources = np.array(["b", "b", "a", "a"])
    numbers = {"acc": np.array([1.0, 1, 0, 0]), "length": np.array([3, 5, np.nan, 4])}
    found = validation_metrics(sources, numbers, ["7", "7", "8", None], 2)
    core = {name: x for name, x in found.items() if name.startswith("val-core/")}
    assert core == {
        "val-core/a/acc/mean@2": 0,
        "val-core/a/acc/best@2/mean": 0,
        "val-core/b/acc/mean@2": 1,
        "val-core/b/acc/best@2/mean": 1,
        "val-core/b/acc/maj@2/mean": 1,
    }
    assert found["val-aux/b/length/mean@2"] == 4
    assert not [name for name in found if "a/length" in name or "a/acc/maj" in name]
    assert {"val-aux/b/acc/std@2", "val-aux/b/acc/worst@2/mean", "val-aux/b/acc/best@2/std"} <= found.keys()
