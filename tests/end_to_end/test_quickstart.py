"""The README's first command, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(config: str, *flags: str) -> str:
    """The command's output; without the flags that the suite sets for itself."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("XLA", "JAX"))}
    command = [sys.executable, "-m", "jaxppo.train", "--config", f"configs/{config}", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_quickstart_learns_to_carry(tmp_path):
    out = run("quickstart.py", "--trainer.output-dir", str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    accuracy = {line["step"]: line.get("val-core/arithmetic/acc/mean@1") for line in lines}
    assert accuracy[0] < 0.40
    assert accuracy[60] > 0.85
    assert f"before {accuracy[0]:.4f}" in out
    assert (tmp_path / "metrics.png").stat().st_size > 10_000
