"""Command lines: a config file's `config()` gives the defaults, every other flag overrides one field."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import tyro

from jaxppo.checks import check_types
from jaxppo.config import Config, ConfigError, UserError, did_you_mean


def load_config(arguments: Sequence[str]) -> Config:
    """Reads `--config FILE` and the overrides. Raises UserError; tyro itself exits for an unknown flag or --help."""
    given, rest = split_config_flag(arguments)
    if given is None and not {"--help", "-h"} & set(rest):
        raise UserError(f"--config is missing: name a config file{_examples()}")
    default = Config() if given is None else read_config_file(Path(given))
    return tyro.cli(
        Config,
        prog="python -m jaxppo.train --config FILE",
        description="PPO with a KL penalty. FILE's config() gives the defaults; each flag overrides one setting.",
        default=default,
        args=rest,
    )


def split_config_flag(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of `--config FILE` or `--config=FILE`, and the other arguments."""
    rest = list(arguments)
    for i, argument in enumerate(rest):
        if argument == "--config":
            return (rest[i + 1] if i + 1 < len(rest) else None), rest[:i] + rest[i + 2 :]
        if argument.startswith("--config="):
            return argument.removeprefix("--config="), rest[:i] + rest[i + 1 :]
    return None, rest


def read_config_file(path: Path) -> Config:
    """The Config that a file's `config()` returns."""
    if not path.is_file():
        others = sorted(str(p) for p in {*path.parent.glob("*.py"), *Path("configs").glob("*.py")})
        raise UserError(f"--config {path}: no such file" + (did_you_mean(str(path), others) or _examples()))
    spec = importlib.util.spec_from_file_location("jaxppo_config_file", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config {path}: a config is a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function = getattr(module, "config", None)
        config = function() if callable(function) else None
    except UserError:
        raise
    except Exception as error:  # whatever a user's file raises
        raise UserError(f"--config {path}: {type(error).__name__}: {error}") from error
    if not isinstance(config, Config):
        raise UserError(f"--config {path}: it must define config() -> jaxppo.config.Config")
    try:
        check_types(config)  # before tyro, which takes them for granted
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    return config


def _examples() -> str:
    found = sorted(str(p) for p in Path("configs").glob("*.py"))
    return f"; here are {', '.join(found)}" if found else ""
