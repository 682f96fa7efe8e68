"""Several processes are one run: the same result as one process, one end for all, and checkpoints that move."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxppo.cli import load_config
from jaxppo.config import MeshConfig
from jaxppo.parallel.mesh import make_mesh
from jaxppo.run.checkpoint import restore
from jaxppo.run.networks import abstract_state, make_networks

ROOT = Path(__file__).parents[2]
SMALL = [
    "--data.train-batch-size=16",
    "--actor.ppo-mini-batch-size=16",
    "--rollout.max-num-seqs=16",
    "--data.val-files",
    "--trainer.no-val-before-train",
    "--algorithm.kl-ctrl.horizon=32",
    "--distributed.heartbeat-timeout-s=10",
]
FAULTY = """
import dataclasses, os, signal
from pathlib import Path
from jaxppo.cli import read_config_file


def config():
    if os.environ.get("JAX_PROCESS_ID") == "1":
        from jaxppo.run import trainer

        step = trainer.ppo_step

        def ppo_step(run, state, *rest):
            if int(state.step) == 1:
                FAULT
            return step(run, state, *rest)

        trainer.ppo_step = ppo_step
    return read_config_file(Path("configs/quickstart.py"))
"""


def launch(processes: int, output_dir: Path, steps: int, config: str = "configs/quickstart.py") -> subprocess.Popen:
    """One run of that many processes, 4 devices in all."""
    devices = f"--xla_force_host_platform_device_count={4 // processes}"
    environ = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices}",  # the last one of a flag counts
    }
    start = ["scripts/launch_local.sh", str(processes), config]
    if processes == 1:
        start = [sys.executable, "-m", "jaxppo.train", "--config", config]
    end = [f"--trainer.total-training-steps={steps}", f"--trainer.output-dir={output_dir}"]
    return subprocess.Popen(
        [*start, *SMALL, *end], cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finished(run: subprocess.Popen, seconds: float = 400) -> str:
    try:
        return run.communicate(timeout=seconds)[0]
    finally:
        run.kill()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    """The output_dir of two steps by 2 processes of 2 devices, and by 1 process of 4."""
    folder = tmp_path_factory.mktemp("runs")
    for processes in (2, 1):
        run = launch(processes, folder / str(processes), 2)
        output = finished(run)
        assert run.returncode == 0, output
    return {processes: folder / str(processes) for processes in (2, 1)}


def arrays(output_dir: Path, step: int) -> list[np.ndarray]:
    """Parameters, moments and the controller's coefficient of a checkpoint."""
    config = load_config(["--config", str(ROOT / "configs/quickstart.py"), *SMALL])
    networks = make_networks(config, make_mesh(MeshConfig(), jax.devices()[:1]))
    state = restore(output_dir / "checkpoints" / f"step_{step}", abstract_state(config, networks)).state
    return [np.asarray(x) for x in jax.tree.leaves(state.replace(key=None))]


def assert_same(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_two_processes_end_where_one_does(runs):
    assert_same(arrays(runs[2], 2), arrays(runs[1], 2))
    lines = [[json.loads(line) for line in (runs[n] / "metrics.jsonl").read_text().splitlines()] for n in (2, 1)]
    assert [line["step"] for line in lines[0]] == [1, 2]
    for two, one in zip(*lines, strict=True):
        names = [name for name in one if not name.startswith(("perf/", "timing"))]
        for name in names:
            np.testing.assert_allclose(two[name], one[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_goes_on_with_one(runs, tmp_path):
    for processes in (2, 1):
        shutil.copytree(runs[processes], tmp_path / str(processes))
        run = launch(1, tmp_path / str(processes), 3)
        output = finished(run)
        assert run.returncode == 0, output
        assert "resuming from" in output
    assert_same(arrays(tmp_path / "2", 3), arrays(tmp_path / "1", 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise RuntimeError('rank one broke')", "error: process 1: RuntimeError: rank one broke"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "heartbeat|died|UNAVAILABLE|Killed"),
    ],
)
def test_what_ends_one_process_ends_all(runs, tmp_path, fault, message):
    config = tmp_path / "faulty.py"
    config.write_text(FAULTY.replace("FAULT", fault))
    run = launch(2, tmp_path / "out", 3, str(config))
    output = finished(run, 150)
    assert run.returncode != 0
    if "|" in message:
        assert any(word in output for word in message.split("|")), output
    else:
        assert output.count(message) == 2, output  # the one that failed and the other one
    assert '"step": 2' not in (tmp_path / "out" / "metrics.jsonl").read_text()
