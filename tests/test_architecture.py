"""The house's rules: rooms import downward, files stay small, torch stays in its corner."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxppo"
ROOMS = ["config_algorithm", "config_guards", "config", "checks"]
ROOMS += ["rl", "models", "parallel", "step", "rollout", "data", "rewards", "run", "planning"]
ROOMS += ["cli", "train", "replay", "plan"]
FILES = sorted(PACKAGE.rglob("*.py"))
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
TRUSTING = {"allow_pickle", "trust_remote_code", "shell"}
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


def unsafe_calls(path: Path, source: str) -> list[str]:
    """Calls that run what they read. Workers alone unpickle, and only what the run itself sends them."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        found += [f"{called} reads pickles"] if called in ("np.load", "numpy.load", "torch.load") else []
        found += [f"{called} runs text"] if called in ("eval", "exec") else []
        found += [f"{called} unpickles"] if called.endswith(".recv") and str(path) != "rewards/worker.py" else []
        found += [f"{called} trusts" for k in node.keywords if k.arg in TRUSTING and ast.unparse(k.value) == "True"]
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
    found += [f"{name} runs what it reads" for name in names if name.split(".")[0] in PICKLES]
    found += unsafe_calls(path, source)
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
        ("data/files.py", "import pickle"),
        ("data/files.py", "def f():\n    from joblib import load"),
        ("data/files.py", "np.load(path)"),
        ("data/files.py", "np.lib.format.read_array(file, allow_pickle=True)"),
        ("data/chat.py", "AutoTokenizer.from_pretrained(path, trust_remote_code=True)"),
        ("rewards/pool.py", "message = worker.connection.recv()"),
        ("rewards/custom.py", "exec(text)"),
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
