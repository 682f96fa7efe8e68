"""A whole run whose reward function fails in every way: each costs its samples, the run goes to its end."""

import os
from pathlib import Path

import pytest

from jaxppo.config import UserError
from jaxppo.run import trainer
from jaxppo.run.metrics import read_metrics
from jaxppo.run.trainer import train
from tests.run.world import change, make_world

FAULTY = """

import ctypes, os, time
from pathlib import Path

def faulty(data_source, solution_str, ground_truth, extra_info):
    \"\"\"The first calls of the whole run, counted in a folder that all workers share, fail.\"\"\"
    for fault in ("crash", "segfault", "hang", "memory", "raise"):
        try:
            Path(__file__).with_name(fault).touch(exist_ok=False)
        except FileExistsError:
            continue
        match fault:
            case "crash":
                os._exit(1)
            case "segfault":
                ctypes.string_at(0)
            case "hang":
                time.sleep(600)
            case "memory":
                bytearray(1 << 30)
            case "raise":
                raise RuntimeError(fault)
    return sum(c.isdigit() for c in solution_str) / 6

def always(data_source, solution_str, ground_truth, extra_info):
    raise RuntimeError("always")
"""


def children() -> list[int]:
    """Worker processes of this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text()
        except OSError:
            continue  # it has just ended
        found += [int(folder.name)] if parent == os.getpid() and "jaxppo.rewards.worker" in command else []
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    config = make_world(folder)
    (folder / "faulty.py").write_text(FAULTY)
    config = change(config, "data", val_files=())
    config = change(config, "trainer", total_training_steps=2, save_freq=-1)
    return change(
        config, "reward", function=f"{folder}/faulty.py:faulty", num_workers=2, timeout_s=5.0, memory_gb=1.0, retries=0
    )


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr(trainer, "plot_or_say", lambda *_: None)


@pytest.mark.slow
def test_every_fault_costs_its_sample_and_the_run_goes_on(config):
    assert int(train(config).step) == 2
    first, second = read_metrics(Path(config.trainer.output_dir) / "metrics.jsonl")
    counts = [{name: line[f"reward/{name}"] for name in ("errors", "timeouts", "crashes")} for line in (first, second)]
    assert counts == [
        {"errors": 1.0, "timeouts": 1.0, "crashes": 3.0},
        {"errors": 0.0, "timeouts": 0.0, "crashes": 0.0},
    ]
    assert children() == []


def test_a_function_that_is_broken_ends_the_run_and_its_workers(config, tmp_path):
    broken = change(config, "reward", function=config.reward.function.replace(":faulty", ":always"))
    with pytest.raises(UserError, match="failed for 8 of 8 samples; the first: RuntimeError: always"):
        train(change(broken, "trainer", output_dir=str(tmp_path)))
    assert children() == []
