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


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -1e39, 10**400, None, "1", {"score": float("nan")}, {"acc": 1.0}]
)
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
            raise RuntimeError("no such\n  digit")
        return True

    result = score_samples(function, SAMPLES)
    assert result.errors == [None, None, "RuntimeError: no such digit", None]
    assert result.scores.tolist() == [1, 1, 0, 1]


def test_a_function_that_always_fails_is_an_error():
    def broken(data_source, solution_str, ground_truth, extra_info):
        return 1 / 0

    with pytest.raises(UserError, match=r"reward.function \(broken\) failed for 4 of 4 samples; the first: ZeroDiv"):
        score_samples(broken, SAMPLES)


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_verl", "arithmetic"])
def test_rows_without_a_ground_truth_are_an_error_not_zeros(name):
    with pytest.raises(UserError, match="2 of 2 samples; the first: ValueError: the row has no reward_model.ground_tr"):
        score_samples(load_reward(name), [Sample("s", "#### None", None, {})] * 2)


def test_no_samples_have_no_scores():
    assert score_samples(load_reward("gsm8k"), []).scores.shape == (0,)


def test_further_numbers_become_metrics():
    result = score_samples(lambda **sample: {"score": 1, "length": len(sample["solution_str"]), "note": "x"}, SAMPLES)
    np.testing.assert_array_equal(result.metrics["reward/length"], [2, 4, 3, 1])
    assert result.metrics.keys() == {"reward/length"}


def test_a_function_sees_its_own_sample_alone():
    seen = []
    score_samples(lambda **sample: seen.append(sample) or 0.0, SAMPLES)
    assert seen == [
        {"data_source": s.data_source, "solution_str": s.solution_str, "ground_truth": "85", "extra_info": {"index": i}}
        for i, s in enumerate(SAMPLES)
    ]


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
    with pytest.raises(ConfigError, match="has no function "):
        load_reward(f"{file}:")
    with pytest.raises(ConfigError, match="no file absent.py"):
        load_reward("absent.py:f")
    with pytest.raises(ConfigError, match=r"gsm8q \(did you mean gsm8k\?\): valid are gsm8k, gsm8k_verl, arithmetic"):
        load_reward("gsm8q")


def test_a_users_file_may_define_dataclasses(tmp_path):
    file = tmp_path / "typed.py"
    file.write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass Verdict:\n    score: float\n"
        "def verdict(data_source, solution_str, ground_truth, extra_info=None):\n    return Verdict(0.5).score\n"
    )
    assert score_samples(load_reward(f"{file}:verdict"), SAMPLES).scores.tolist() == [0.5] * 4


@pytest.mark.parametrize(
    ("text", "reason"), [("import absent_module_of_rewards", "ModuleNotFoundError: "), ("def f(:", "SyntaxError: ")]
)
def test_a_users_file_that_cannot_be_imported(tmp_path, text, reason):
    file = tmp_path / "broken.py"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError, match=rf"broken.py cannot be imported \({reason}") as caught:
        load_reward(f"{file}:f")
    assert "\n" not in str(caught.value)


def test_what_the_file_defines_must_be_callable(tmp_path):
    file = tmp_path / "constant.py"
    file.write_text("score = 1.0\n")
    with pytest.raises(ConfigError, match="has no function score"):
        load_reward(f"{file}:score")
