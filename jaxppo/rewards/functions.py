"""From the name in the config to a function."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxppo.config import ConfigError, did_you_mean
from jaxppo.rewards import arithmetic, gsm8k
from jaxppo.rewards.custom import load_custom

RewardFunction = Callable[..., Any]
"""verl's signature, see `calling`."""

IN_PROCESS: dict[str, RewardFunction] = {
    "gsm8k": partial(gsm8k.compute_score, mode="robust"),
    "gsm8k_verl": partial(gsm8k.compute_score, mode="verl"),
    "arithmetic": arithmetic.compute_score,
}
"""Linear in the response, whatever it says (tested): they need no worker to guard the run, and no start-up."""
BUILT_IN = (*IN_PROCESS, "math")


def load_function(name: str) -> RewardFunction:
    """A built-in function, or one from FILE.py:NAME. Raises ConfigError naming the valid ones."""
    if name in IN_PROCESS:
        return IN_PROCESS[name]
    if name == "math":
        try:
            from jaxppo.rewards import math  # here, since it is optional and takes a second
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"reward.function = math needs {error.name}: install math-verify, e.g. pip install 'jaxppo[math]'"
            ) from None
        return math.compute_score
    if ".py:" in name:
        return load_custom(name)
    hint = did_you_mean(name, BUILT_IN)
    raise ConfigError(f"reward.function = {name}{hint}: valid are {', '.join(BUILT_IN)} and FILE.py:NAME")
