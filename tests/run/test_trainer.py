"""What the loop does with responses, and what it tells."""

import math

import numpy as np
import pytest

from jaxppo.config import ActorConfig, Config, DataConfig, KLControlConfig, MeshConfig
from jaxppo.data.prompts import Prompt
from jaxppo.parallel.mesh import make_mesh
from jaxppo.rollout.engine import Completion, Sampling
from jaxppo.run.console import Display
from jaxppo.run.metrics import MetricsFile, to_line
from jaxppo.run.programs import rows_per_microbatch
from jaxppo.run.report import curves, plot, plot_or_say
from jaxppo.run.validation import score_completions, validate
from tests.fakes import reward_of


def completion(tokens: list[int], reason: str) -> Completion:
    return Completion(np.array(tokens, np.int32), -np.arange(len(tokens), dtype=np.float32), reason, 3)


def test_a_completion_has_a_log_probability_for_each_token():
    with pytest.raises(ValueError, match="3 tokens with 4 log-probabilities"):
        Completion(np.zeros(3, np.int32), np.zeros(4, np.float32), "stop", 0)


@pytest.mark.parametrize(
    ("mini", "tokens", "rows"),
    [
        (1, 1024, 8),  # one row a device is the least
        (64, 1024, 8),
        (64, 4096, 32),
        (16, 1 << 20, 16),  # no more than a minibatch can fill
    ],
)
def test_rows_of_a_microbatch(mini, tokens, rows):
    config = Config(
        data=DataConfig(train_batch_size=64),
        actor=ActorConfig(ppo_mini_batch_size=mini, max_tokens_per_device=tokens, row_length=1024),
    )
    assert rows_per_microbatch(config, make_mesh(MeshConfig())) == rows


class Echo:
    """A tokenizer that writes ids down, and an engine that answers with the prompt."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))

    def generate(self, prompts, sampling, key):
        self.sampling = sampling
        reasons = ("stop", "length")
        return [completion(list(p), reasons[j % 2]) for p in prompts for j in range(sampling.n)]


def test_validation_counts_exactly_its_rows():
    """1319 rows, whatever divides them or not, by source; mean@n is over n responses of each."""
    prompts = [Prompt(i, (i % 7, 5), "p", "ab"[i % 2], str(i % 7), {}) for i in range(1319)]
    seen = []

    def score(data_source, solution_str, ground_truth, extra_info):
        seen.append(solution_str)
        return float(solution_str == f"{ground_truth} 5" and data_source == "a")

    echo = Echo()
    sampling = Sampling(temperature=0.0, n=2, max_new_tokens=4, eos_ids=(2,))
    metrics, samples = validate(echo, echo, reward_of(score), prompts, sampling, None, 3)
    assert len(seen) == 2 * 1319
    assert {name: x for name, x in metrics.items() if "/acc/" not in name or "mean@" in name} == {
        "val-core/a/acc/mean@2": 1.0,
        "val-core/b/acc/mean@2": 0.0,
        "val-aux/a/response_length/mean": 2.0,
        "val-aux/b/response_length/mean": 2.0,
        "val-aux/a/response_length/clip_ratio": 0.5,
        "val-aux/b/response_length/clip_ratio": 0.5,
        "val-aux/num_prompts": 1319.0,
        "val-aux/reward_errors": 0.0,
    }
    assert [s.score for s in samples] == [1.0, 0.0, 1.0]
    assert echo.sampling is sampling


def test_a_failing_sample_costs_itself():
    def score(data_source, solution_str, ground_truth, extra_info):
        return {"1": 1.0, "2": math.nan}[solution_str]

    prompts = [Prompt(i, (9,), "p", "s", "", {}) for i in range(3)]
    completions = [completion([token], "stop") for token in (1, 2, 3)]
    texts, scores = score_completions(Echo(), reward_of(score), prompts, completions)
    assert texts == ["1", "2", "3"]
    assert scores.scores.tolist() == [1, 0, 0]
    assert scores.errors[0] is None
    assert "the score is nan" in scores.errors[1]
    assert scores.errors[2] == "KeyError: '3'"


def test_without_a_terminal_there_are_plain_lines(capsys):
    with Display(12, 0) as display:
        display.say("[bold]not markup[/bold]")
        metrics = {"critic/score/mean": 0.5, "actor/reward_kl_penalty": 0.25, "response_length/mean": 2.75}
        display.step(3, metrics | {"timing_s/step": 2.0})
    want = "[bold]not markup[/bold]\nstep  3  score 0.500  kl 0.2500  length 2.8  s 2.00\n"
    assert capsys.readouterr().out == want


def test_curves_are_of_one_metric_or_of_all_below_a_slash():
    lines = [
        {"step": 0, "val-core/a/acc/mean@1": 0.25, "val-core/b/acc/mean@1": 0.5},
        {"step": 1, "actor/reward_kl_penalty": 0.1, "actor/reward_kl_penalty_coeff": 7.0},
        {"step": 2, "actor/reward_kl_penalty": None, "val-core/a/acc/mean@1": 0.75},
    ]
    assert curves(lines, "actor/reward_kl_penalty") == {"actor/reward_kl_penalty": [(1, 0.1)]}
    assert curves(lines, "val-core/") == {
        "val-core/a/acc/mean@1": [(0, 0.25), (2, 0.75)],
        "val-core/b/acc/mean@1": [(0, 0.5)],
    }
    assert curves(lines, "actor/entropy") == {}


def test_the_plot_is_a_picture_of_what_there_is(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", None)
    file.write(to_line(0, {"val-core/a/acc/mean@1": 0.25}))
    file.write(to_line(1, {"critic/score/mean": 0.5, "actor/reward_kl_penalty": math.nan}))
    file.write(to_line(2, {"critic/score/mean": 0.7, "actor/reward_kl_penalty": 0.1, "val-core/a/acc/mean@1": 0.5}))
    file.close()
    plot(file.path, tmp_path / "metrics.png", KLControlConfig(type="adaptive"))
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    empty = MetricsFile(tmp_path / "empty.jsonl", None)
    empty.close()
    plot(empty.path, tmp_path / "empty.png", KLControlConfig())
    assert (tmp_path / "empty.png").exists()


def test_a_picture_that_cannot_be_drawn_is_a_line(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", None)
    file.write(to_line(1, {"critic/score/mean": 0.5}))
    file.close()
    said: list[str] = []
    plot_or_say(file.path, tmp_path / "no_folder" / "metrics.png", KLControlConfig(), said.append)
    assert len(said) == 1
    assert "metrics.png: not drawn (FileNotFoundError" in said[0]
