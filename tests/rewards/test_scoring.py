import numpy as np
import pytest

from jaxppo.config import ConfigError, UserError
from jaxppo.rewards.scoring import Sample, load_reward, score_samples

SAMPLES = [Sample("arithmetic", text, "85", {"index": i}) for i, text in enumerate(["85", " 85\n", "850", "8"])]


def test_arithmetic_wants_the_number_alone():
    assert score_samples(load_reward("arithmetic"), SAMPLES).scores.tolist() == [1, 1, 0, 0]


def test_gsm8k_by_name():
    samples = [Sample("openai/gsm8k", "so\n#### $1,234", "1234", {})]
    assert score_samples(load_reward("gsm8k"), samples).scores.tolist() == [1]
    assert score_samples(load_reward("gsm8k_verl"), samples).scores.tolist() == [0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "1", {"score": float("nan")}, {"acc": 1.0}])
def test_a_sample_without_a_finite_score_costs_itself_alone(bad, caplog):
    def function(data_source, solution_str, ground_truth, extra_info):
        return bad if extra_info["index"] == 1 else 0.5

    result = score_samples(function, SAMPLES)
    assert result.scores.tolist() == [0.5, 0.0, 0.5, 0.5]
    assert [error is None for error in result.errors] == [True, False, True, True]
    assert "failed for 1 of 4 samples" in caplog.text


def test_a_function_that_raises_costs_the_sample_and_is_told_why():
    def function(data_source, solution_str, ground_truth, extra_info):
        if extra_info["index"] == 2:
            raise RuntimeError("no such digit")
        return True

    result = score_samples(function, SAMPLES)
    assert result.errors == [None, None, "RuntimeError: no such digit", None]
    assert result.scores.tolist() == [1, 1, 0, 1]


def test_a_function_that_always_fails_is_an_error():
    with pytest.raises(UserError, match=r"reward.function failed for all 4 samples; the first: ZeroDivisionError"):
        score_samples(lambda **_: 1 / 0, SAMPLES)


def test_further_numbers_become_metrics():
    result = score_samples(lambda **sample: {"score": 1, "length": len(sample["solution_str"]), "note": "x"}, SAMPLES)
    np.testing.assert_array_equal(result.metrics["reward/length"], [2, 4, 3, 1])
    assert result.metrics.keys() == {"reward/length"}


def test_a_function_cannot_change_the_next_ones_sample():
    def function(data_source, solution_str, ground_truth, extra_info):
        extra_info["index"] += 100
        return 0.0

    score_samples(function, SAMPLES)
    assert [sample.extra_info["index"] for sample in SAMPLES] == [0, 1, 2, 3]


def test_a_users_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def exact(data_source, solution_str, ground_truth, extra_info=None):\n    return 2.0\n")
    assert score_samples(load_reward(f"{file}:exact"), SAMPLES).scores.tolist() == [2, 2, 2, 2]
    with pytest.raises(ConfigError, match=r"has no function exakt \(did you mean exact\?\)"):
        load_reward(f"{file}:exakt")
    with pytest.raises(ConfigError, match="no file absent.py"):
        load_reward("absent.py:f")
    with pytest.raises(ConfigError, match=r"gsm8q \(did you mean gsm8k\?\): valid are gsm8k, gsm8k_verl, arithmetic"):
        load_reward("gsm8q")
