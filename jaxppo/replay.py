"""python -m jaxppo.replay RUN --step N [--mesh.AXIS SIZE ...]: computes a recorded step again, and compares.

On the recorded mesh the next state must be the recorded one bit for bit. With another mesh the largest difference of
every parameter is listed. RUN is a run's output_dir; trainer.record_steps says which steps of a run are recorded.

Exit status: 0 where they are equal, or, on another mesh, within --tolerance; 1 where they are not; 2 for a mistake.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from jaxppo.cli import to_flags
from jaxppo.config import MeshConfig, UserError


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jaxppo.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run's output_dir")
    parser.add_argument("--step", type=int, required=True, help="the recorded PPO step")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="on another mesh: the largest difference, relative to the array's largest element, that counts as equal",
    )
    given, rest = parser.parse_known_args(arguments)
    try:
        raise SystemExit(_replay(given.run, given.step, given.tolerance, to_flags(rest)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _replay(run: Path, step: int, tolerance: float | None, flags: Sequence[str]) -> int:
    from jaxppo.run.recording import read_record

    if other := [flag for flag in flags if flag.startswith("--") and not flag.startswith("--mesh.")]:
        raise UserError(f"{other[0]}: a replay keeps the recorded settings; only --mesh.* can differ")
    record = read_record(run, step)
    recorded = MeshConfig(**record.mesh)
    mesh = tyro.cli(MeshConfig, default=recorded, args=[flag.replace("--mesh.", "--") for flag in flags])
    devices = math.prod(size for size in (mesh.data, mesh.fsdp, mesh.context, mesh.tensor) if size > 0)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        import jax

        jax.config.update("jax_num_cpu_devices", devices)  # of no effect where there are GPUs
    from jaxppo.run.replaying import replay

    result = replay(run, record, mesh)
    print("\n".join(result.lines()))
    if result.equal:
        return 0
    same = mesh == recorded and result.platform == record.platform
    return 1 if same or tolerance is None or result.worst > tolerance else 0


if __name__ == "__main__":
    main()
