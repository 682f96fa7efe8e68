"""python -m jaxppo.plan --config FILE --device h200 [--section.setting VALUE ...]: what a run needs, without a GPU.

Beside a run's settings: --device (a100, h100, h200, b200), --devices N (where an axis of the mesh is -1) and
--length-share X (every sequence has this share of its maximal length; 0.75).
"""

import math
import os
import sys
import typing
from collections.abc import Sequence

from jaxppo.checks import check
from jaxppo.cli import load_config
from jaxppo.config import MeshConfig, UserError

FLAGS = {"--device": "h200", "--devices": "", "--length-share": "0.75"}
COMPILE_FAST = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
"""No machine code is run."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit status 0 with the plan on stdout, whether it fits or not; 2 with one line for a mistake."""
    try:
        _plan(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _plan(arguments: Sequence[str]) -> None:
    given, rest = own_flags(arguments)
    config = check(load_config(rest))
    share = _number(given, "--length-share")
    if not 0 < share <= 1:
        raise UserError(f"--length-share {given['--length-share']}: valid is a number above 0, up to 1")
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = (os.environ.get("XLA_FLAGS", ""), *COMPILE_FAST)
    count = f"--xla_force_host_platform_device_count={num_devices(config.mesh, given['--devices'])}"
    os.environ["XLA_FLAGS"] = " ".join((*flags, count))

    from jaxppo.planning.plan import make_plan
    from jaxppo.planning.rates import Device
    from jaxppo.planning.report import lines

    if given["--device"] not in (valid := typing.get_args(Device)):
        raise UserError(f"--device {given['--device']}: valid is {', '.join(valid)}")
    device: Device = given["--device"]  # type: ignore[assignment]
    for line in lines(make_plan(config, device, share)):
        print(line)


def own_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The plan's own flags with their values, and the other arguments."""
    found, rest, words = dict(FLAGS), [], iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in FLAGS:
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if not value:
            raise UserError(f"{name}: a value is missing")
        found[name] = value
    return found, rest


def num_devices(mesh: MeshConfig, given: str) -> int:
    """What the mesh's axes multiply to, or what was given where one is -1."""
    sizes = (mesh.data, mesh.fsdp, mesh.context, mesh.tensor)
    if given:
        if not given.isdecimal() or int(given) < 1:
            raise UserError(f"--devices {given}: valid is a number of devices")
        return int(given)
    if min(sizes) < 1:
        axis = ("data", "fsdp", "context", "tensor")[sizes.index(min(sizes))]
        raise UserError(f"mesh.{axis} = {min(sizes)}: give its size, or --devices N")
    return math.prod(sizes)


def _number(given: dict[str, str], name: str) -> float:
    try:
        return float(given[name])
    except ValueError:
        raise UserError(f"{name} {given[name]}: valid is a number") from None


if __name__ == "__main__":
    main()
