"""metrics.jsonl stays valid whatever happens, and its numbers are what they are called."""

import json
import math
import resource

import numpy as np
import pytest

from jaxppo.config import UserError
from jaxppo.rollout.engine import Completion
from jaxppo.run.metrics import (
    MetricsFile,
    Stopwatch,
    performance_metrics,
    read_metrics,
    rollout_metrics,
    to_line,
    write_file,
)
from jaxppo.run.validation import accuracy_summary


def completion(length: int, reason: str) -> Completion:
    return Completion(np.zeros(length, np.int32), np.zeros(length, np.float32), reason, 0)


def test_lengths_and_scores():
    """A response that ends with EOS at the limit is not truncated."""
    completions = [completion(4, "stop"), completion(4, "length"), completion(1, "stop"), completion(3, "stop")]
    metrics = rollout_metrics([2, 2, 5, 5], completions, np.array([0.0, 1.0, 0.5, 0.5]), (5, 4))
    assert metrics == {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "response_length/mean": 3.0,
        "response_length/max": 4.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": 0.25,
        "prompt_length/mean": 3.5,
        "prompt_length/max": 5.0,
        "prompt_length/min": 2.0,
        "prompt_length/clip_ratio": 0.5,
    }


def test_throughput_counts_both_kinds_of_tokens_per_device():
    timing = {"timing_s/gen": 2.0, "timing_s/score": 0.5, "timing_s/update": 1.0}
    metrics = performance_metrics(timing | {"timing_s/step": 9.0, "timing_s/compile": 5.0}, 100, 300, 8)
    assert metrics["perf/total_num_tokens"] == 400
    assert metrics["perf/throughput"] == 400 / 4 / 8
    assert metrics["perf/time_per_step"] == 4
    assert metrics["timing_per_token_ms/gen"] == pytest.approx(1e3 * 2 / 300)


def test_a_stopwatch_adds_up_what_it_is_used_for():
    watch = Stopwatch()
    with watch("gen"):
        pass
    with watch("gen"):
        pass
    timing = watch.metrics()
    assert timing.keys() == {"timing_s/gen", "timing_s/compile", "timing_s/step"}
    assert 0 <= timing["timing_s/gen"] <= timing["timing_s/step"]
    assert timing["timing_s/compile"] == 0


def test_what_compiles_is_a_phase_of_its_own(monkeypatch):
    now = iter([0.0, 0.0, 10.0, 10.0])  # the watch's start, the phase's, its end and the watch's end
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = type("Clock", (), {"seconds": 1.0})()
    monkeypatch.setattr("jaxppo.run.metrics.compile_clock", lambda: clock)
    watch = Stopwatch()
    with watch("update"):
        clock.seconds += 7.0
    assert watch.metrics() == {"timing_s/compile": 7.0, "timing_s/update": 3.0, "timing_s/step": 10.0}


def test_a_line_starts_with_its_step_and_is_json_throughout(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", None)
    file.write(to_line(3, {"b": math.nan, "a": 1.0, "c": math.inf}))
    text = (tmp_path / "metrics.jsonl").read_text()  # before any close: the line was flushed
    assert text == '{"step": 3, "a": 1.0, "b": null, "c": null}\n'
    assert json.loads(text) == {"step": 3, "a": 1.0, "b": None, "c": None}
    file.close()


def test_a_kill_in_the_middle_of_a_line_costs_that_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "x": 1')
    assert [line["step"] for line in read_metrics(path)] == [0, 1]


@pytest.mark.parametrize(
    ("written", "resumed", "kept"),
    [
        ('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st', {"step": 2, "x": 5}, [0, 1, 2]),
        ('{"step": 0}\n{"step": 1}\n', {"step": 2, "x": 5}, [0, 1, 2]),
        ("", {"step": 2, "x": 5}, [2]),
        (None, {"step": 2, "x": 5}, [2]),
        ('{"step": 0}\n{"step": 1}\n', None, []),
    ],
)
def test_a_resumed_file_ends_with_the_line_of_the_checkpoint(written, resumed, kept, tmp_path):
    path = tmp_path / "metrics.jsonl"
    if written is not None:
        path.write_text(written)
    file = MetricsFile(path, resumed)
    lines = read_metrics(path)
    assert [line["step"] for line in lines] == kept
    assert resumed is None or lines[-1] == resumed
    file.write({"step": 9})
    file.close()
    assert [line["step"] for line in read_metrics(path)] == [*kept, 9]


@pytest.fixture
def full_disk():
    """No file grows over 100 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line_and_keeps_the_lines_before(tmp_path, full_disk):
    file = MetricsFile(tmp_path / "metrics.jsonl", None)
    file.write({"step": 1})
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written \(File too large\)"):
        file.write({"step": 2, "x": "x" * 100})
    file.close()
    assert read_metrics(file.path) == [{"step": 1}]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path, full_disk):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written \(Is a directory\)"):
        MetricsFile(tmp_path / "metrics.jsonl", None)
    (tmp_path / "config.json").write_text("old")
    with pytest.raises(UserError, match=r"config\.json: cannot be written \(File too large\)"):
        write_file(tmp_path / "config.json", "x" * 200)
    assert (tmp_path / "config.json").read_text() == "old"


def test_the_summary_names_the_first_and_the_last_validation():
    lines = [
        {"step": 0, "val-core/a/acc/mean@1": 0.2, "val-core/b/acc/mean@1": 0.4},
        {"step": 1},
        {"step": 2, "val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 0.5},
        {"step": 4, "val-core/a/acc/mean@1": 1.0, "val-core/b/acc/mean@1": 0.5},
    ]
    assert accuracy_summary(lines) == "accuracy before 0.3000  after 0.7500"
    assert accuracy_summary(lines[1:3]) == "accuracy after 0.5000"
    assert accuracy_summary([{"step": 1}]) == "accuracy not measured"
