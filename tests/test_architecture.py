"""The house's rules: rooms import downward, files stay small, torch stays in its corner."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxppo"
ROOMS = ["config", "checks", "rl", "models", "parallel", "step", "rollout", "data", "rewards", "run", "cli", "train"]
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_keeps_the_rules(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own != "__init__":
        above = ROOMS[: ROOMS.index(own) + 1]
        below = {n for n in imports(path) if n.startswith("jaxppo.") and room(n) not in above}
        assert not below, f"{own} imports from below: {below}"
    allowed_torch = path.name.startswith("vllm_")
    heavy = {n for n in imports(path) if n.split(".")[0] in ("torch", "vllm")}
    assert allowed_torch or not heavy
    assert len(path.read_text().splitlines()) <= 350


def test_rl_knows_jax_alone():
    known = ("jaxppo.rl", "jax", "jaxtyping", "flax", "dataclasses", "math", "typing")
    for path in (PACKAGE / "rl").glob("*.py"):
        assert not {n for n in imports(path) if not n.startswith(known)}, path
