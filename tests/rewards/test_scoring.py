import numpy as np
import pytest

from jaxppo.config import ConfigError, RewardConfig, UserError
from jaxppo.rewards.calling import Sample
from jaxppo.rewards.functions import load_function
from jaxppo.rewards.scoring import open_reward
from tests.fakes import reward_of

SAMPLES = [Sample("arithmetic", text, "85", {"index": i}) for i, text in enumerate(["85", " 85\n", "850", "8"])]


def score(function, samples=SAMPLES, **settings):
    """Of a built-in function by name, or of any other in the test's own process."""
    if isinstance(function, str):
        return open_reward(RewardConfig(function=function, **settings)).score(samples)
    return reward_of(function, **settings).score(samples)


def test_arithmetic_wants_the_number_alone():
    assert score("arithmetic").scores.tolist() == [1, 1, 0, 0]


def test_gsm8k_by_name():
    samples = [Sample("openai/gsm8k", "so\n#### $1,234", "1234", {})]
    assert score("gsm8k", samples).scores.tolist() == [1]
    assert score("gsm8k_verl", samples).scores.tolist() == [0]


@pytest.mark.parametrize("truth", ["18", 18, 18.0])
def test_a_ground_truth_may_be_a_number(truth):
    samples = [Sample("openai/gsm8k", "#### 18", truth, {})]
    assert score("gsm8k_verl", samples).scores.tolist() == [1]
    assert score("gsm8k", samples).scores.tolist() == [1]
    assert score("arithmetic", [Sample("a", "18", truth, {})]).scores.tolist() == [1]


@pytest.mark.parametrize(
    "bad",
    [float("nan"), float("inf"), -1e39, 10**400, None, "1", {"score": float("nan")}, {"acc": 1.0}, np.zeros(2), [1.0]],
)
def test_a_sample_without_a_finite_score_costs_itself_alone(bad, caplog):
    def function(data_source, solution_str, ground_truth, extra_info):
        return bad if extra_info["index"] == 1 else 0.5

    result = score(function, error_score=-2.0)
    assert result.scores.tolist() == [0.5, -2.0, 0.5, 0.5]
    assert [error is None for error in result.errors] == [True, False, True, True]
    assert result.failures == {"reward/errors": 1.0, "reward/timeouts": 0.0, "reward/crashes": 0.0}
    assert "failed for 1 of 4 samples" in caplog.text


@pytest.mark.parametrize("good", [True, 1, 1.0, np.float32(1), np.bool_(True), np.int64(1), np.ones(())])
def test_what_counts_as_a_number(good):
    assert score(lambda **sample: good).scores.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(("error", "reason"), [(RuntimeError("no such\n  digit"), "RuntimeError: no such digit"),
                                               (SystemExit(3), "SystemExit: 3")])  # fmt: skip
def test_a_function_that_raises_costs_the_sample_and_is_told_why(error, reason):
    def function(data_source, solution_str, ground_truth, extra_info):
        if extra_info["index"] == 2:
            raise error
        return True

    result = score(function)
    assert result.errors == [None, None, reason, None]
    assert result.scores.tolist() == [1, 1, 0, 1]


def test_a_function_that_always_fails_is_an_error():
    def broken(data_source, solution_str, ground_truth, extra_info):
        return 1 / 0

    with pytest.raises(UserError, match=r"reward.function = mine failed for 4 of 4 samples; the first: ZeroDiv"):
        score(broken)


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_verl", "arithmetic"])
def test_rows_without_a_ground_truth_are_an_error_not_zeros(name):
    with pytest.raises(UserError, match="2 of 2 samples; the first: ValueError: the row has no reward_model.ground_tr"):
        score(name, [Sample("s", "#### None", None, {})] * 2)


def test_a_ground_truth_that_is_no_number_is_an_error_not_a_zero():
    samples = [Sample("s", "#### 1", truth, {}) for truth in ("1", "one")]
    result = score("gsm8k", samples)
    assert result.errors[0] is None
    assert result.errors[1] == "ValueError: reward_model.ground_truth = 'one' is no number"


def test_no_samples_have_no_scores():
    assert score("gsm8k", []).scores.shape == (0,)


def test_the_answer_that_was_read_is_kept_apart_from_numbers():
    def answers(data_source, solution_str, ground_truth, extra_info):
        return {"score": 1.0, "pred": solution_str * 300} if extra_info["index"] else {"score": 1.0, "pred": None}

    result = score(answers)
    assert result.preds[0] is None
    assert [len(pred) for pred in result.preds[1:]] == [200] * 3
    assert result.metrics == {}


def test_further_numbers_become_metrics():
    result = score(
        lambda **sample: {"score": 1, "length": len(sample["solution_str"]), "note": "x", "acc": float("nan")}
    )
    np.testing.assert_array_equal(result.metrics["reward/length"], [2, 4, 3, 1])
    assert result.metrics.keys() == {"reward/length"}


def test_a_function_sees_its_own_sample_alone():
    seen = []
    score(lambda **sample: seen.append(sample) or 0.0)
    assert seen == [
        {"data_source": s.data_source, "solution_str": s.solution_str, "ground_truth": "85", "extra_info": {"index": i}}
        for i, s in enumerate(SAMPLES)
    ]


def test_a_function_cannot_change_the_next_ones_sample():
    shared = {"index": 0}
    samples = [Sample("s", "", [], shared)] * 3

    def function(data_source, solution_str, ground_truth, extra_info):
        extra_info["index"] += 100
        ground_truth.append(1)
        return extra_info["index"] + len(ground_truth)

    assert score(function, samples).scores.tolist() == [101, 101, 101]
    assert shared == {"index": 0}


async def slowly(data_source, solution_str, ground_truth, extra_info):
    import asyncio

    await asyncio.sleep({"8": 60, "850": 0.0}.get(solution_str, 0.1))
    if solution_str == "850":
        raise KeyError("judge")
    return {"score": 2.0, "asked": 1}


def test_an_async_function_waits_for_all_samples_together():
    result = score(slowly)
    assert result.scores.tolist() == [2, 2, 0, 0]
    assert result.errors[2:] == ["KeyError: 'judge'", "longer than reward.timeout_s = 1"]
    assert result.failures == {"reward/errors": 1.0, "reward/timeouts": 1.0, "reward/crashes": 0.0}


def test_a_batched_function_gets_the_batch():
    calls = []

    def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
        calls.append(len(solution_strs))
        assert (data_sources, ground_truths) == (["arithmetic"] * 4, ["85"] * 4)
        return [{"score": len(text), "first": i["index"]} for text, i in zip(solution_strs, extra_infos, strict=True)]

    result = score(compute_scores)
    assert calls == [4]
    assert result.scores.tolist() == [2, 4, 3, 1]
    assert result.metrics["reward/first"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", ["raises", "miscounts", "one is nan"])
def test_a_batched_function_that_fails_is_asked_for_each_sample_alone(fault):
    def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
        if "850" not in solution_strs:
            return [1.0] * len(solution_strs)
        if fault == "raises":
            raise RuntimeError("850")
        return (
            [1.0] * (len(solution_strs) + 1)
            if fault == "miscounts"
            else [float("nan" if s == "850" else 1) for s in solution_strs]
        )

    result = score(compute_scores)
    assert result.scores.tolist() == [1, 1, 0, 1]
    assert result.failures["reward/errors"] == 1


def test_a_users_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def exact(data_source, solution_str, ground_truth, extra_info=None):\n    return 2.0\n")
    assert score(f"{file}:exact", num_workers=0).scores.tolist() == [2, 2, 2, 2]
    with pytest.raises(ConfigError, match=r"has no function exakt \(did you mean exact\?\)"):
        load_function(f"{file}:exakt")
    with pytest.raises(ConfigError, match="has no function "):
        load_function(f"{file}:")
    with pytest.raises(ConfigError, match="no file absent.py"):
        load_function("absent.py:f")
    with pytest.raises(
        ConfigError, match=r"gsm8q \(did you mean gsm8k\?\): valid are gsm8k, gsm8k_verl, arithmetic, m"
    ):
        load_function("gsm8q")


def test_a_users_file_may_define_dataclasses(tmp_path):
    file = tmp_path / "typed.py"
    file.write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass Verdict:\n    score: float\n"
        "def verdict(data_source, solution_str, ground_truth, extra_info=None):\n    return Verdict(0.5).score\n"
    )
    assert score(f"{file}:verdict", num_workers=0).scores.tolist() == [0.5] * 4


@pytest.mark.parametrize(
    ("text", "reason"), [("import absent_module_of_rewards", "ModuleNotFoundError: "), ("def f(:", "SyntaxError: ")]
)
def test_a_users_file_that_cannot_be_imported(tmp_path, text, reason):
    file = tmp_path / "broken.py"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError, match=rf"broken.py cannot be imported \({reason}") as caught:
        load_function(f"{file}:f")
    assert "\n" not in str(caught.value)


def test_what_the_file_defines_must_be_callable(tmp_path):
    file = tmp_path / "constant.py"
    file.write_text("score = 1.0\n")
    with pytest.raises(ConfigError, match="has no function score"):
        load_function(f"{file}:score")
