"""Reward functions from a user's file: "FILE.py:NAME" with verl's signature."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from jaxppo.config import ConfigError, did_you_mean


def load_custom(spec: str) -> Callable[..., float | dict[str, float]]:
    """The function NAME of FILE.py: compute_score(data_source, solution_str, ground_truth, extra_info) -> score.

    It returns a number, or a dict with `score` and further numbers that become metrics. Raises ConfigError where the
    file is missing or cannot be imported, or has no such function.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"reward.function = {spec}: no file {file}")
    module_spec = importlib.util.spec_from_file_location(f"jaxppo_reward_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"reward.function = {spec}: {file} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look their module up by name
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises; its traceback stays with the error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"reward.function = {spec}: {file} cannot be imported ({reason})") from error
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if name not in functions:
        hint = did_you_mean(name, functions)
        raise ConfigError(f"reward.function = {spec}: {file} has no function {name}{hint}")
    return vars(module)[name]
