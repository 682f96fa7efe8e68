"""A recorded PPO step: the state before it, its packed batch, its settings, and the state after it.

Layout: output_dir/recorded/step_N/{before, after, batch.safetensors, record.json}; a directory appears under that name
once it is whole. What a step's scoring and update computed can be computed again from it: `jaxppo.replay`.
"""

import dataclasses
import hashlib
import json
import shutil
import typing
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from jaxppo.config import Config, UserError
from jaxppo.run.checkpoint import with_key_data
from jaxppo.step.state import PackedBatch, TrainState

T = TypeVar("T")
FORMAT = 1
BATCH = "batch.safetensors"


@dataclasses.dataclass(frozen=True)
class Record:
    """record.json: what a replay needs beside the arrays."""

    step: int
    config: dict[str, Any]
    mesh: dict[str, int]
    """Devices along each axis."""
    platform: str
    versions: dict[str, str]
    batch: str
    """SHA-256 of batch.safetensors."""
    before: str
    """SHA-256 of the state before the step, as `after` of the one after it."""
    after: str
    metrics: dict[str, float]
    """Of scoring and update."""
    format: int = FORMAT


class Recording:
    """One step as it happens: made before the update, which takes the state's buffers, and finished after it."""

    def __init__(self, output_dir: str, step: int, state: TrainState, batch: PackedBatch) -> None:
        """`batch` is the host's. Raises UserError where the directory cannot be written."""
        self._path, self._step = directory(output_dir, step), step
        self._unfinished = self._path.with_name(f"unfinished_{self._path.name}")
        try:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished.mkdir(parents=True)
            save_state(self._unfinished / "before", state)
            arrays = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
            save_file(
                {name: np.atleast_1d(x) for name, x in arrays.items() if x is not None},
                self._unfinished / BATCH,
            )
        except OSError as error:
            raise _cannot_write(self._path, error) from None
        self._before = fingerprint(state)

    def finish(self, state: TrainState, metrics: dict[str, Any], config: Config, mesh: Mesh) -> None:
        """Writes the state after the update, and makes the recording count."""
        record = Record(
            step=self._step,
            config=dataclasses.asdict(config),
            mesh=dict(mesh.shape),
            platform=mesh.devices.flat[0].device_kind,
            versions={"jax": jax.__version__},
            batch=file_hash(self._unfinished / BATCH),
            before=self._before,
            after=fingerprint(state),
            metrics={name: float(x) for name, x in metrics.items()},
        )
        try:
            save_state(self._unfinished / "after", state)
            (self._unfinished / "record.json").write_text(json.dumps(dataclasses.asdict(record), indent=2) + "\n")
            shutil.rmtree(self._path, ignore_errors=True)
            self._unfinished.rename(self._path)
        except OSError as error:
            raise _cannot_write(self._path, error) from None


def directory(output_dir: str | Path, step: int) -> Path:
    return Path(output_dir).absolute() / "recorded" / f"step_{step}"


def read_record(run: Path, step: int) -> Record:
    """Raises UserError where the step was not recorded, naming those that were."""
    path = directory(run, step) / "record.json"
    if not path.is_file():
        steps = sorted(int(p.parent.name.removeprefix("step_")) for p in path.parent.parent.glob("step_*/record.json"))
        known = f"recorded are {', '.join(map(str, steps))}" if steps else "none is: see trainer.record_steps"
        raise UserError(f"{run}: step {step} was not recorded; {known}")
    try:
        return Record(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: the recording is damaged, or of another version ({error})") from None


def read_batch(run: Path, record: Record) -> PackedBatch:
    """The step's packed batch, as host arrays. Raises UserError where it is not the recorded one."""
    path = directory(run, record.step) / BATCH
    if not path.is_file() or file_hash(path) != record.batch:
        raise UserError(f"{path}: its hash is not the recorded {record.batch}: the recording is damaged")
    arrays: dict[str, Any] = load_file(path)
    return PackedBatch(**arrays | {"num_sequences": arrays["num_sequences"][0]})


def save_state(path: Path, state: TrainState) -> None:
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(with_key_data(state)))


def read_state(path: Path, abstract_state: TrainState) -> TrainState:
    """In the layout of `abstract_state`, whatever mesh wrote it. Raises UserError where it does not fit."""
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        try:
            state = checkpointer.restore(path, args=ocp.args.StandardRestore(with_key_data(abstract_state)))
        except (ValueError, OSError, KeyError) as error:
            raise UserError(f"{path}: cannot be read ({str(error).strip().partition(chr(10))[0]})") from None
    return dataclasses.replace(state, key=jax.random.wrap_key_data(state.key))


def fingerprint(state: TrainState) -> str:
    """SHA-256 of every array's name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, array in host_arrays(state).items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def host_arrays(state: TrainState) -> dict[str, np.ndarray]:
    """Every array of a state by its name. Example of one: "actor['layers']['q']"."""
    leaves = jax.tree_util.tree_leaves_with_path(with_key_data(state))
    return {jax.tree_util.keystr(path).lstrip("."): np.asarray(x) for path, x in leaves}


def regroup(batch: PackedBatch, rows: int) -> PackedBatch:
    """The same rows in the same order, in microbatches of another number of rows; empty rows fill the last.

    Example: microbatches of 2 rows, 3 of them with tokens, become 2 microbatches of 4, the last row of them empty.
    """
    minibatches, microbatches, old, length = batch.tokens.shape
    count = -(-microbatches * old // rows)

    def split(x: Any) -> Any:
        if np.ndim(x) != 4:
            return x
        flat = np.asarray(x).reshape(minibatches, microbatches * old, length)
        flat = np.pad(flat, ((0, 0), (0, count * rows - flat.shape[1]), (0, 0)))
        return flat.reshape(minibatches, count, rows, length)

    filled = np.any(np.asarray(batch.segment_ids) != 0, axis=-1).reshape(minibatches, -1).sum(axis=1)
    used: Any = (-(-filled // rows)).astype(np.int32)
    return dataclasses.replace(jax.tree.map(split, batch), num_microbatches=used)


def from_plain(kind: type[T], plain: dict[str, Any]) -> T:
    """A configuration from what `dataclasses.asdict` and JSON made of it: lists are tuples again.

    Raises UserError for a setting that this version does not know.
    """
    hints = typing.get_type_hints(kind)
    if unknown := sorted(plain.keys() - hints.keys()):
        raise UserError(f"{kind.__name__} has no {', '.join(unknown)}: it was recorded by another version")
    values = {}
    for name, value in plain.items():
        if dataclasses.is_dataclass(hints[name]):
            value = from_plain(hints[name], value)
        values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"trainer.record_steps: {path} cannot be written ({error.strerror})")
