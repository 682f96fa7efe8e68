"""With the real math-verify, in a worker where its own time-outs must work."""

import builtins

import pytest

from jaxppo.config import ConfigError, RewardConfig
from jaxppo.rewards.calling import Sample
from jaxppo.rewards.functions import load_function
from jaxppo.rewards.scoring import open_reward

TABLE = [
    # response, truth, score
    (r"so $x = \frac{2}{4}$", "1/2", 1),
    (r"\boxed{0.5}", r"\frac{1}{2}", 1),
    ("The answer is 18.", "18", 1),
    ("#### 18", 18, 1),
    (r"\boxed{1/2}", 0.5, 1),
    (r"\boxed{19}", "18", 0),
    (r"$\boxed{(1, 2)}$", "(1,2)", 1),
    (r"$1+x^2$", "x^2+1", 1),
    ("", "18", 0),
    ("\\frac{" * 3000, "10", 0),
    (r"\boxed{9^{9^{9^{9^9}}}}", "10", 0),  # runs into math-verify's time-out
]


def test_answers_are_compared_by_value_and_hostile_ones_cost_seconds_not_the_run():
    pytest.importorskip("math_verify")
    reward = open_reward(RewardConfig(function="math", num_workers=1, retries=0))
    try:
        samples = [Sample("math", response, truth, {}) for response, truth, _ in TABLE]
        result = reward.score([*samples, Sample("math", "1", "", {}), Sample("math", "1", None, {})])
    finally:
        reward.close()
    assert result.scores.tolist() == [score for *_, score in TABLE] + [0, 0]
    assert result.errors[: len(TABLE)] == [None] * len(TABLE)
    assert result.errors[-1] == "ValueError: reward_model.ground_truth = None is no mathematical expression"


def test_a_missing_package_is_one_line(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **more):
        if name == "jaxppo.rewards" and "math" in (rest[2] if len(rest) > 2 else ()):
            raise ModuleNotFoundError("no", name="math_verify")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"reward.function = math needs math_verify: install .* 'jaxppo\[math\]'"):
        load_function("math")
