"""Command lines: a config file's `config()` gives the defaults, every other flag overrides one field."""

import difflib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import tyro

from jaxppo.config import Config, UserError


def load_config(arguments: Sequence[str]) -> Config:
    """Reads `--config FILE` and the overrides. Raises UserError; tyro itself exits for an unknown flag or --help."""
    rest = list(arguments)
    path = None
    for i, argument in enumerate(rest):
        if argument == "--config" or argument.startswith("--config="):
            value = argument.partition("=")[2] if "=" in argument else (rest[i + 1 : i + 2] or [""])[0]
            path, rest = value, rest[:i] + rest[i + (1 if "=" in argument else 2) :]
            break
    if path is None and "--help" not in rest and "-h" not in rest:
        raise UserError("--config is missing: name a file such as configs/quickstart.py")
    default = Config() if path is None else read_config_file(Path(path))
    return tyro.cli(Config, default=default, args=rest, description="Runs PPO. --config FILE gives the defaults.")


def read_config_file(path: Path) -> Config:
    """The Config that a file's `config()` returns."""
    if not path.is_file():
        others = sorted(str(p) for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(str(path), others, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"--config {path}: no such file{hint}")
    spec = importlib.util.spec_from_file_location("jaxppo_config_file", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config {path}: a config is a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, "config", None)
    config = function() if callable(function) else None
    if not isinstance(config, Config):
        raise UserError(f"--config {path}: it must define config() -> jaxppo.config.Config")
    return config
