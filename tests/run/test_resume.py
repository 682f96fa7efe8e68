"""A run that is cut and resumed is the run that was not, bit for bit; a broken checkpoint is never resumed from."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxppo.config import Config, ConfigError, UserError
from jaxppo.data.loader import PromptLoader
from jaxppo.run import trainer
from jaxppo.run.metrics import read_metrics
from jaxppo.run.setup import build
from jaxppo.run.trainer import train
from tests.run.world import change, make_world, rows, write_rows

CLOCK = ("timing", "perf/")
STEPS = 6
SECRET = "hf_of_the_environment_alone"
KILLER = """

import os
import signal
from pathlib import Path

calls = 0


def score_and_kill(**sample):
    global calls
    calls += 1
    flag = Path(__file__).with_name("killed")
    if not flag.exists() and calls == 7 + 3 * 8 + 7 + 4:  # validation, 3 steps, validation, half of the 4th
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return score(**sample)
"""


@pytest.fixture(scope="module", autouse=True)
def no_plots():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "plot_or_say", lambda *_: None)
        patch.setenv("HF_TOKEN", SECRET)
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    return make_world(tmp_path_factory.mktemp("world"))


class Result:
    """What a run left: its last state as NumPy, its lines without clocks, and the rows of the prompts that it drew."""

    def __init__(self, config: Config) -> None:
        drawn: list[list[int]] = []
        original = PromptLoader.__next__

        def spy(loader: PromptLoader):
            batch = original(loader)
            drawn.append([prompt.index for prompt in batch])
            return batch

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PromptLoader, "__next__", spy)
            state = train(config)
        self.prompts = drawn
        self.state = jax.tree.map(np.asarray, (state.actor, state.critic, state.actor_opt, state.critic_opt, state.kl))
        self.key = np.asarray(jax.random.key_data(state.key))
        self.step = int(state.step)
        self.lines = lines_of(config)


def lines_of(config: Config) -> list[dict]:
    lines = read_metrics(Path(config.trainer.output_dir) / "metrics.jsonl")
    return [{name: x for name, x in line.items() if not name.startswith(CLOCK)} for line in lines]


@pytest.fixture(scope="module")
def whole(config) -> Result:
    return Result(config)


def cut(config: Config, step: int, folder: Path) -> Config:
    """A run directory as a kill after `step` leaves it: later lines of metrics, the last one half written."""
    source = Path(config.trainer.output_dir)
    shutil.copytree(source / "checkpoints" / f"step_{step}", folder / "checkpoints" / f"step_{step}")
    written = (source / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(written[: step + 2]) + '{"step": 99, "actor/pg_lo')
    return change(config, "trainer", output_dir=str(folder))


def assert_same(resumed: Result, whole: Result) -> None:
    assert resumed.step == whole.step
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    np.testing.assert_array_equal(resumed.key, whole.key)
    assert resumed.lines == whole.lines


def test_the_uninterrupted_run(whole):
    assert [line["step"] for line in whole.lines] == list(range(STEPS + 1))
    assert len(set(map(tuple, whole.prompts))) == STEPS  # 2 steps an epoch, each epoch in its own order
    coefficients = [line["actor/reward_kl_penalty_coeff"] for line in whole.lines[1:]]
    assert coefficients[0] == pytest.approx(0.05)
    assert len(set(coefficients)) > 2


def test_no_secret_of_the_environment_is_written(whole, config):
    files = [path for path in Path(config.trainer.output_dir).rglob("*") if path.is_file()]
    assert {"config.json", "metrics.jsonl"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_cut_in_the_middle_of_an_epoch(config, whole, tmp_path):
    resumed = Result(cut(config, 3, tmp_path))
    assert_same(resumed, whole)
    assert resumed.prompts == whole.prompts[3:]


def test_cut_at_the_end_of_an_epoch_and_resumed_twice(config, whole, tmp_path):
    config = cut(config, 2, tmp_path)
    draw, draws = PromptLoader.__next__, iter(range(STEPS))

    def crash(loader: PromptLoader):
        if next(draws) == 2:
            raise KeyboardInterrupt
        return draw(loader)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLoader, "__next__", crash)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert lines_of(config) == whole.lines[:5]
    again = Result(config)
    assert_same(again, whole)
    assert again.prompts == whole.prompts[4:]


def test_a_run_killed_with_9_goes_on(config, whole, tmp_path):
    """The reward function kills its own process in the middle of the fourth step, right after the third step's save."""
    reward = tmp_path / "reward.py"
    reward.write_text(Path(config.reward.function.partition(":")[0]).read_text() + KILLER)
    config = change(config, "trainer", output_dir=str(tmp_path / "run"))
    config = change(config, "reward", function=f"{reward}:score_and_kill", num_workers=0)
    (tmp_path / "settings.py").write_text(f"from jaxppo.config import *\n\n\ndef config():\n    return {config!r}\n")
    # `python -m jaxppo.train` as the tests import it: so it finds their compiled programs
    code = "import runpy, tests.conftest; runpy.run_module('jaxppo.train', run_name='__main__')"
    command = [sys.executable, "-c", code, "--config", str(tmp_path / "settings.py")]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert (tmp_path / "killed").exists()
    assert_same(Result(config), whole)


def test_what_waits_in_host_memory_comes_back_the_same(config, whole, tmp_path):
    offloaded = change(cut(config, 3, tmp_path), "rollout", offload=("optimizer", "critic", "reference"))
    assert_same(Result(offloaded), whole)
    again = build(offloaded).state  # of the checkpoint that was written from host memory
    jax.tree.map(np.testing.assert_array_equal, again.actor_opt, whole.state[2])


def test_a_finished_run_stays_as_it_is(config, whole, capsys):
    again = Result(config)
    assert_same(again, whole)
    assert again.prompts == []
    assert "accuracy before 0." in capsys.readouterr().out


def test_a_resumed_run_takes_another_mesh(config, whole, tmp_path):
    found = build(change(cut(config, 3, tmp_path), "mesh", data=2, fsdp=2, tensor=2))
    expected = build(cut(config, 3, tmp_path / "again"))
    assert int(found.state.step) == 3
    assert found.state.actor["layers"]["up"].sharding.mesh.shape == {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}
    for name in ("actor", "critic", "actor_opt", "kl"):
        jax.tree.map(np.testing.assert_array_equal, getattr(found.state, name), getattr(expected.state, name))


def test_the_reference_is_the_base_model_and_not_the_resumed_policy(config, whole, tmp_path):
    resumed = build(cut(config, 3, tmp_path))
    fresh = build(change(config, "trainer", output_dir=str(tmp_path / "fresh")))
    jax.tree.map(np.testing.assert_array_equal, resumed.reference, fresh.state.actor)
    assert not np.array_equal(resumed.reference["embed"], resumed.state.actor["embed"])
    assert build(change(config, "algorithm", use_kl_in_reward=False)).reference is None


def test_what_a_resumed_run_cannot_change(config, whole, tmp_path):
    config = cut(config, 3, tmp_path)
    other = write_rows(tmp_path / "other.parquet", rows(11))
    with pytest.raises(UserError, match=r"data\.train_files: the prompts differ"):
        build(change(config, "data", train_files=(other,)))
    with pytest.raises(ConfigError, match=r"data\.seed = 2: a run resumed .* must keep its 1"):
        build(change(config, "data", seed=2))
    folder = Path(shutil.copytree(config.model.path, tmp_path / "wider"))
    described = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 128}
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"cannot be restored into the configured model"):
        build(change(config, "model", path=str(folder)))


def test_what_it_may_change_is_said(config, whole, tmp_path):
    notes = build(change(cut(config, 3, tmp_path), "actor", lr=1e-3)).notes
    assert "actor.lr: 0.01 in the checkpoint, 0.001 now" in notes


def test_a_new_run_does_not_mix_with_an_old_one(config, whole):
    with pytest.raises(ConfigError, match=r"already holds step_6, but trainer\.resume starts from step 0"):
        build(change(config, "trainer", resume="never"))
    with pytest.raises(ConfigError, match=r"already holds step_6, but trainer\.resume starts from step 2"):
        build(change(config, "trainer", resume=f"{config.trainer.output_dir}/checkpoints/step_2"))


def test_a_path_goes_on_elsewhere(config, whole, tmp_path):
    source = f"{config.trainer.output_dir}/checkpoints/step_5"
    elsewhere = change(config, "trainer", resume=source, output_dir=str(tmp_path))
    resumed = Result(elsewhere)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    assert resumed.lines == whole.lines[5:]
