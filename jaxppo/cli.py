"""Command lines: a config file's `config()` gives the defaults, every other flag overrides one field."""

import importlib.util
import math
import typing
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import tyro

from jaxppo.checks import check_types, in_words, settings
from jaxppo.config import Config, ConfigError, UserError, did_you_mean

BOOLEANS = {"true": True, "false": False}


def load_config(arguments: Sequence[str]) -> Config:
    """Reads `--config FILE` and the overrides. Raises UserError; tyro itself exits for --help."""
    given, rest = split_config_flag(arguments)
    rest = to_flags(rest)
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


def to_flags(arguments: Sequence[str]) -> list[str]:
    """The overrides as tyro spells them. Raises UserError for what is no flag, naming the nearest.

    Example: ["--actor.use_kl_loss", "True"] and ["--actor.use_kl_loss=true"] become ["--actor.use-kl-loss"].
    """
    kinds = {_to_flag(name): kind for name, kind in settings().items()}
    for flag in [flag for flag, kind in kinds.items() if kind is bool]:
        kinds[_negated(flag)] = NoneType  # takes no value
    given, found = deque(arguments), []
    while given:
        word = given.popleft()
        name, equals, value = word.partition("=")
        flag = _to_flag(name.lstrip("-"))
        if word in ("--help", "-h"):
            found.append(word)
        elif not word.startswith("--"):
            raise UserError(_stray(word, kinds))
        elif flag not in kinds:
            raise UserError(f"{name}: no such flag{_suggest(flag, kinds)}")
        elif kinds[flag] is bool:
            if not equals:
                value = given.popleft() if given and given[0].lower() in BOOLEANS else "true"
            if value.lower() not in BOOLEANS:
                raise UserError(f"{flag} {value}: valid is True or False")
            found.append(flag if BOOLEANS[value.lower()] else _negated(flag))
        else:
            item, least, most = _takes(kinds[flag])
            values = [value] if equals else []
            while given and not equals and len(values) < most and not _starts_a_setting(given[0], kinds):
                values.append(given.popleft())
            if len(values) < least or not all(_reads(x, item) for x in values):
                near = did_you_mean(" ".join(values), map(str, typing.get_args(item)))
                raise UserError(f"{' '.join([flag, *values])}: valid is {in_words(kinds[flag])}{near}")
            found += [f"{flag}={value}"] if equals else [flag, *values]
    return found


def _to_flag(setting: str) -> str:
    """Example: "actor.use_kl_loss" is --actor.use-kl-loss."""
    return f"--{setting}".replace("_", "-")


def _negated(flag: str) -> str:
    """Example: --actor.no-use-kl-loss."""
    section, _, name = flag.rpartition(".")
    return f"{section}.no-{name}"


def _takes(kind: Any) -> tuple[Any, float, float]:
    """The type of a flag's values, and the least and the greatest number of them."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is not tuple:
        return (kind, 0, 0) if kind is NoneType else (kind, 1, 1)
    return (arguments[0], 0, math.inf) if arguments[-1] is ... else (arguments[0], len(arguments), len(arguments))


def _reads(word: str, kind: Any) -> bool:
    """Whether a word is a value of a type."""
    if typing.get_origin(kind) is Literal:
        return word in map(str, typing.get_args(kind))
    if alternatives := typing.get_args(kind):  # X | None
        return any(_reads(word, x) for x in alternatives)
    if kind is NoneType:
        return word == "None"
    try:
        kind(word)
    except ValueError:
        return False
    return True


def _starts_a_setting(word: str, flags: Iterable[str]) -> bool:
    return word.startswith("--") or _is_assignment(word, flags)


def _is_assignment(word: str, flags: Iterable[str]) -> bool:
    """Whether it is a setting in Hydra's spelling, as `actor.lr=1e-4`."""
    name, equals, _ = word.partition("=")
    return bool(equals) and _to_flag(name.lstrip("+")) in flags


def _stray(word: str, flags: Iterable[str]) -> str:
    name, equals, value = word.partition("=")
    flag = _to_flag(name.lstrip("+"))
    if _is_assignment(word, flags):
        return f"{word}: write {flag} {value}"
    hint = _suggest(flag, flags) if equals else ""
    return f"{word}: settings are written as --section.setting VALUE{hint}"


def _suggest(flag: str, flags: Iterable[str]) -> str:
    """Example: --lr may mean --actor.lr or --critic.lr."""
    same_name = [other for other in flags if other.rpartition(".")[2] == flag.removeprefix("--")]
    if same_name:
        return f" (did you mean {' or '.join(same_name)}?)"
    return did_you_mean(flag, [*flags, "--config"])


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
