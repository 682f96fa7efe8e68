"""Scoring and update of a recorded step, computed again, beside what was recorded."""

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np

from jaxppo.config import Config, MeshConfig, UserError
from jaxppo.parallel.mesh import make_mesh, place_rows
from jaxppo.parallel.offload import to_device
from jaxppo.run.networks import abstract_state, make_networks, reference_params
from jaxppo.run.programs import Programs
from jaxppo.run.recording import (
    Record,
    directory,
    fingerprint,
    from_plain,
    host_arrays,
    read_batch,
    read_state,
    regroup,
)

LISTED = 20
"""Differences that are printed."""


@dataclasses.dataclass(frozen=True)
class Replay:
    """What came out."""

    step: int
    equal: bool
    """Bit for bit."""
    platform: str
    differences: dict[str, float]
    """Of each array of the next state, the largest |replayed - recorded| over the largest |recorded|; those over 0."""
    metrics: dict[str, tuple[float, float]]
    """Those that differ by more than 0.1 %: recorded and replayed."""

    @property
    def worst(self) -> float:
        return max(self.differences.values(), default=0.0)

    def lines(self) -> list[str]:
        """For a person."""
        metrics = [f"  {name}: {old!r} recorded, {new!r} now" for name, (old, new) in self.metrics.items()]
        if self.equal:
            return [f"step {self.step}: the next state is the recorded one, bit for bit", *metrics]
        largest = sorted(self.differences.items(), key=lambda item: -item[1])
        return [
            f"step {self.step}: {len(largest)} arrays differ from the recorded ones; the largest differences, relative "
            "to the array's largest element:",
            *(f"  {difference:9.2e}  {name}" for name, difference in largest[:LISTED]),
            *([f"  and {len(largest) - LISTED} more"] if len(largest) > LISTED else []),
            *metrics,
        ]


def replay(run: Path, record: Record, mesh_config: MeshConfig) -> Replay:
    """Raises UserError where the recording is damaged, or does not fit the mesh or this version."""
    config = dataclasses.replace(from_plain(Config, record.config), mesh=mesh_config)
    sizes = [getattr(mesh_config, axis) for axis in record.mesh]
    wanted = math.prod(size for size in sizes if size > 0) if -1 not in sizes else len(jax.devices())
    if wanted > len(jax.devices()):
        raise UserError(f"the mesh needs {wanted} devices, here are {len(jax.devices())}: --mesh.* sets another")
    mesh = make_mesh(mesh_config, jax.devices()[:wanted])
    networks = make_networks(config, mesh)
    programs = Programs(config, mesh, networks.actor, networks.critic)
    abstract, path = abstract_state(config, networks), directory(run, record.step)
    state = read_state(path / "before", abstract)
    if fingerprint(state) != record.before:
        raise UserError(f"{path}/before: its hash is not the recorded {record.before}: the recording is damaged")
    batch = read_batch(run, record)
    batch = place_rows(batch if batch.tokens.shape[2] == programs.rows else regroup(batch, programs.rows), mesh)
    experience = programs.score(state, to_device(reference_params(config, networks)), batch)
    state, metrics = programs.update(state, experience)
    recorded, replayed = (host_arrays(s) for s in (read_state(path / "after", abstract), state))
    differences = {name: _difference(recorded[name], replayed[name]) for name in recorded}
    now = {name: float(x) for name, x in metrics.items()}
    return Replay(
        step=record.step,
        equal=fingerprint(state) == record.after,
        platform=mesh.devices.flat[0].device_kind,
        differences={name: x for name, x in differences.items() if x != 0},
        metrics={
            name: (old, now[name])
            for name, old in record.metrics.items()
            if not np.isclose(old, now[name], rtol=1e-3, atol=1e-6, equal_nan=True)
        },
    )


def _difference(old: np.ndarray, new: np.ndarray) -> float:
    if np.array_equal(old, new, equal_nan=old.dtype.kind == "f"):
        return 0.0
    old, new = old.astype(np.float64), new.astype(np.float64)
    return float(np.abs(new - old).max() / max(np.abs(old).max(), np.finfo(np.float32).tiny))
