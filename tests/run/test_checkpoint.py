"""Checkpoints are complete or absent, and the last complete one survives whatever happens."""

import dataclasses
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxppo.config import Config, ConfigError, UserError
from jaxppo.rl.kl import FixedKL
from jaxppo.run.checkpoint import Checkpoints, is_complete, restore, take
from jaxppo.step.state import TrainState


def weights(step: int, size: int = 4) -> np.ndarray:
    """Noise, so that it cannot be compressed."""
    return np.random.default_rng(step).standard_normal(size).astype(np.float32)


def state_of(step: int, size: int = 4) -> TrainState:
    return TrainState(
        actor={"w": jnp.array(weights(step, size))},
        critic={"w": jnp.full(4, -float(step))},
        actor_opt={"count": jnp.int32(step)},
        critic_opt={"count": jnp.int32(step)},
        kl=FixedKL(0.1 * step).init(),
        step=jnp.int32(step),
        key=jax.random.key(7),
    )


def abstract(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def save(checkpoints: Checkpoints, step: int, **change: Any) -> None:
    checkpoints.save(state_of(step, **change), {"position": step}, {"step": step, "x": None}, Config(), "print")


def steps(checkpoints: Checkpoints) -> set[str]:
    return {path.name for path in checkpoints.directory.glob("step_*")}


def test_a_round_trip_gives_back_everything(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), None)
    save(checkpoints, 3)
    checkpoints.close()
    found = Checkpoints(str(tmp_path), None).find("auto")
    assert found is not None
    resumed = restore(found, abstract(state_of(0)))
    assert jax.random.key_data(resumed.state.key).tolist() == jax.random.key_data(jax.random.key(7)).tolist()
    assert resumed.state.kl.coef == np.float32(0.3)
    np.testing.assert_array_equal(resumed.state.actor["w"], weights(3))
    assert (resumed.data, resumed.line, resumed.fingerprint) == ({"position": 3}, {"step": 3, "x": None}, "print")
    assert resumed.config["actor"]["betas"] == [0.9, 0.999]


def test_a_run_without_a_critic_has_none_in_its_checkpoint(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), None)
    alone = state_of(1).replace(critic=None, critic_opt=None)
    checkpoints.save(alone, {}, {"step": 1}, Config(), "print")
    checkpoints.close()
    resumed = restore(checkpoints.directory / "step_1", abstract(alone))
    assert resumed.state.critic is None
    assert resumed.state.critic_opt is None
    np.testing.assert_array_equal(resumed.state.actor["w"], weights(1))
    with pytest.raises(UserError, match="cannot be restored into the configured model with a critic"):
        restore(checkpoints.directory / "step_1", abstract(state_of(0)))


def test_a_save_keeps_what_is_donated_afterwards(tmp_path):
    """The next update overwrites the buffers while the writing still goes on."""
    checkpoints = Checkpoints(str(tmp_path), None)
    state = state_of(1, size=1 << 20)
    overwrite = jax.jit(lambda s: s.replace(actor={"w": s.actor["w"] * 0 - 5}), donate_argnums=0)
    checkpoints.save(state, {}, {"step": 1}, Config(), "print")
    jax.block_until_ready(overwrite(state))
    checkpoints.close()
    resumed = restore(checkpoints.directory / "step_1", abstract(state_of(0, size=1 << 20)))
    np.testing.assert_array_equal(resumed.state.actor["w"], weights(1, 1 << 20))


def test_incomplete_directories_are_set_aside(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), None)
    save(checkpoints, 20)
    checkpoints.close()
    (checkpoints.directory / "step_30" / "state").mkdir(parents=True)
    (checkpoints.directory / "step_40.orbax-checkpoint-tmp-12" / "state").mkdir(parents=True)
    again = Checkpoints(str(tmp_path), None)
    assert again.find("auto") == checkpoints.directory / "step_20"
    assert (checkpoints.directory / "incomplete_step_30").is_dir()
    save(again, 30)
    again.close()
    assert Checkpoints(str(tmp_path), None).find("auto") == checkpoints.directory / "step_30"


def test_nothing_to_resume(tmp_path):
    checkpoints = Checkpoints(str(tmp_path / "new"), None)
    assert checkpoints.find("auto") is None
    assert checkpoints.find("never") is None
    for missing in ("nowhere", str(tmp_path)):
        with pytest.raises(ConfigError, match=rf"trainer\.resume = {missing}: valid is auto, never, or the path"):
            checkpoints.find(missing)


def test_old_ones_go_only_when_their_successor_is_complete(tmp_path, monkeypatch):
    checkpoints = Checkpoints(str(tmp_path), 1)
    save(checkpoints, 1)
    checkpoints.wait()
    save(checkpoints, 2)
    checkpoints.wait()
    assert steps(checkpoints) == {"step_2"}
    checkpoints.close()


@pytest.mark.parametrize("after", ["at once", "a while"])
def test_kill_9_during_a_save_leaves_the_last_complete_one(after, tmp_path):
    script = f"""
import os, signal, sys, threading, time
from tests.run.test_checkpoint import Checkpoints, save
checkpoints = Checkpoints({str(tmp_path)!r}, 1)
save(checkpoints, 1, size=1 << 20)
checkpoints.wait()
if {after!r} == "a while":
    threading.Thread(target=lambda: (time.sleep(0.02), os.kill(os.getpid(), signal.SIGKILL))).start()
save(checkpoints, 2, size=1 << 22)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    checkpoints = Checkpoints(str(tmp_path), 1)
    found = checkpoints.find("auto")
    assert found is not None
    step = int(found.name.removeprefix("step_"))
    size = {1: 1 << 20, 2: 1 << 22}[step]
    resumed = restore(found, abstract(state_of(0, size=size)))
    np.testing.assert_array_equal(resumed.state.actor["w"], weights(step, size))
    save(checkpoints, 3)
    checkpoints.close()
    assert steps(checkpoints) == {"step_3"}


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"trainer\.output_dir = .*file/run: cannot be written"):
        Checkpoints(str(tmp_path / "file" / "run"), None)


def test_a_full_disk_is_told_and_costs_only_the_new_checkpoint(tmp_path):
    """A limit on the size of files stands for the full disk."""
    script = f"""
import resource
from jaxppo.config import UserError
from tests.run.test_checkpoint import Checkpoints, save
checkpoints = Checkpoints({str(tmp_path)!r}, 1)
save(checkpoints, 1)
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    save(checkpoints, 2, size=1 << 22)
    checkpoints.wait()
except UserError as error:
    print("told:", error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "told:" in done.stdout, done.stderr[-3000:]
    assert "the last complete one is kept" in done.stdout
    found = Checkpoints(str(tmp_path), 1).find("auto")
    assert found is not None
    assert found.name == "step_1"
    assert is_complete(found)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [(truncate, r"has \d+ bytes instead of \d+"), (flip, "checksum of .* differs"), (Path.unlink, "is missing")],
)
def test_a_damaged_one_is_noticed_and_the_one_before_it_used(damage, words, tmp_path):
    checkpoints = Checkpoints(str(tmp_path), None)
    for step in (1, 2):
        save(checkpoints, step)
    checkpoints.close()
    largest = max((checkpoints.directory / "step_2" / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    damage(largest)
    with pytest.raises(UserError, match=f"this checkpoint is damaged .*{words}"):
        Checkpoints(str(tmp_path), None).find(str(checkpoints.directory / "step_2"))
    again = Checkpoints(str(tmp_path), None)
    found = again.find("auto")
    assert found == checkpoints.directory / "step_1"
    assert re.search(rf"step_2 is damaged \(.*{words}\): set aside", again.notes[0])
    np.testing.assert_array_equal(restore(found, abstract(state_of(0))).state.actor["w"], weights(1))
    again.refuse_later(1)
    save(again, 2)
    again.close()
    assert Checkpoints(str(tmp_path), None).find("auto") == checkpoints.directory / "step_2"


def test_the_best_one_is_kept_beside_the_newest(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), 1, "val-core/a")
    for step, value in {1: 0.1, 2: 0.9, 3: 0.3, 4: None, 5: 0.2}.items():
        line = {"step": step, "critic/score/mean": 0.5} | ({} if value is None else {"val-core/a": value})
        checkpoints.save(state_of(step), {}, line, Config(), "print")
        checkpoints.wait()
    assert steps(checkpoints) == {"step_2", "step_5"}
    checkpoints.close()
    wrong = Checkpoints(str(tmp_path / "wrong"), 1, "val-core/b")
    with pytest.raises(ConfigError, match=r"trainer\.best_metric = val-core/b: no step has .* mean val-core/a\?"):
        wrong.save(state_of(1), {}, {"step": 1, "critic/score/mean": 0.5, "val-core/a": 1.0}, Config(), "print")


def test_a_resume_takes_what_it_is_told_to():
    config, old, first = Config(), state_of(3), state_of(0)
    kept = take(old, None, config)
    assert kept.actor is old.actor
    assert float(kept.kl.coef) == np.float32(config.algorithm.kl_ctrl.kl_coef)  # a fixed one is the config's
    adaptive = dataclasses.replace(config.algorithm.kl_ctrl, type="adaptive")
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, kl_ctrl=adaptive))
    assert take(old, None, config).kl is old.kl
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, load_contents=("model", "data")))
    taken = take(old, first, config)
    assert (taken.actor, taken.critic, taken.step, taken.key) == (old.actor, old.critic, old.step, old.key)
    assert (taken.actor_opt, taken.critic_opt, taken.kl) == (first.actor_opt, first.critic_opt, first.kl)


def test_an_error_without_words_is_told_by_its_name(tmp_path, monkeypatch):
    checkpoints = Checkpoints(str(tmp_path), None)
    save(checkpoints, 1)
    checkpoints.close()

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError

    monkeypatch.setattr(ocp.Checkpointer, "restore", fail)
    with pytest.raises(UserError, match=r"cannot be restored .* \(ValueError\)"):
        restore(checkpoints.directory / "step_1", abstract(state_of(0)))
