"""The house's rules: rooms import downward, files stay small, torch stays in its corner."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxppo"
ROOMS = ["config_algorithm", "config", "checks"]
ROOMS += ["rl", "models", "parallel", "step", "rollout", "data", "rewards", "run", "cli", "train"]
FILES = sorted(PACKAGE.rglob("*.py"))
RL_MAY_USE = {"jax", "jaxtyping", "flax", "dataclasses", "math", "typing"}


def imports(source: str) -> set[str]:
    """Dotted names that a file imports, wherever in it; `from jaxppo import rl` is jaxppo.rl."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found.add("a relative import")
            elif node.module == "jaxppo":
                found |= {f"jaxppo.{alias.name}" for alias in node.names}
            else:
                found.add(node.module or "")
    return found


def faults(path: Path, source: str) -> list[str]:
    """Every rule that a file breaks, given where it lies in the package."""
    names, own = imports(source), path.with_suffix("").parts[0]
    found = [name for name in names if name == "a relative import"]
    if own != "__init__":
        allowed = {"rl"} if own == "rl" else set(ROOMS[: ROOMS.index(own) + 1])
        ours = {name for name in names if name.split(".")[0] == "jaxppo"}
        found += [f"{own} imports {name}" for name in ours if name == "jaxppo" or name.split(".")[1] not in allowed]
    if not path.match("rollout/vllm_*.py"):
        found += [f"{name} outside vLLM's engine" for name in names if name.split(".")[0] in ("torch", "vllm")]
    if own == "rl":
        found += [f"rl imports {name}" for name in names if name.split(".")[0] not in {"jaxppo", *RL_MAY_USE}]
    if len(source.splitlines()) > 350:
        found.append("over 350 lines")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_keeps_the_rules(path):
    assert faults(path.relative_to(PACKAGE), path.read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("models/layers.py", "from jaxppo.step.state import TrainState"),
        ("models/layers.py", "from jaxppo import train"),
        ("models/layers.py", "import jaxppo"),
        ("models/layers.py", "def f():\n    import jaxppo.run.trainer"),
        ("models/layers.py", "from . import heads"),
        ("rl/kl.py", "from jaxppo.config import Config"),
        ("rl/kl.py", "import numpy"),
        ("data/vllm_x.py", "import torch"),
        ("rollout/jax_engine.py", "from vllm import LLM"),
        ("run/trainer.py", "\n" * 351),
    ],
)
def test_a_broken_rule_is_noticed(path, source):
    assert len(faults(Path(path), source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("models/layers.py", "from jaxppo.config import UserError\nfrom jaxppo import models"),
        ("rl/kl.py", "import jax.numpy as jnp\nfrom jaxppo.rl.masked import keep"),
        ("rollout/vllm_weights.py", "import torch"),
    ],
)
def test_what_the_rules_allow(path, source):
    assert faults(Path(path), source) == []
