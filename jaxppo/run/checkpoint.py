"""Checkpoints: the whole TrainState and where the data stands, written by Orbax in the background, complete or absent.

Layout: output_dir/checkpoints/step_N/{state, extra, manifest.json}. A directory counts once Orbax has finished it;
what a killed process left is set aside, and so is one whose files are not those of its manifest. An old one is
deleted only after its successor is complete.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from jaxppo.config import Config, ConfigError, UserError, did_you_mean
from jaxppo.parallel.distributed import from_first, is_first
from jaxppo.run.manifest import find_fault, write_manifest
from jaxppo.step.state import TrainState

FIXED = ("data.train_batch_size", "data.shuffle", "data.seed", "trainer.seed")
"""Settings that give a position in the data and a key their meaning: a resumed run cannot change them."""
SILENT = ("trainer", "rollout", "mesh", "reward", "guards")
"""Sections whose other settings a resumed run may change without a word."""


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What roll-backs have left."""

    rollbacks: int
    rates: tuple[float, float] | None
    """Learning rates of actor and critic instead of the config's; None before the first roll-back."""


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What a checkpoint holds."""

    state: TrainState
    data: dict[str, Any]
    """The prompt loader's state."""
    config: dict[str, Any]
    fingerprint: str
    """Of the training prompts."""
    line: dict[str, Any]
    """The step's line of metrics.jsonl."""
    recovery: Recovery


class Checkpoints:
    """The checkpoints of one run. Raises UserError where the directory cannot be written."""

    def __init__(self, output_dir: str, max_to_keep: int | None, best_metric: str | None = None) -> None:
        """With `best_metric`, the one with its greatest value is kept beside the newest `max_to_keep`."""
        self.directory = Path(output_dir).absolute() / "checkpoints"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            from_first(self._set_incomplete_aside)
        except OSError as error:
            raise UserError(f"trainer.output_dir = {output_dir}: cannot be written ({error.strerror})") from None
        self.notes: list[str] = []
        """What `find` has set aside."""
        self._best_metric, self._writing = best_metric, ""
        keep: list[managers.PreservationPolicy] = [managers.LatestN(max_to_keep)]
        if best_metric is not None:
            keep.append(managers.BestN(get_metric_fn=lambda x: x["value"], n=1, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy(keep),
            step_prefix="step",
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def save(
        self,
        state: TrainState,
        data: dict[str, Any],
        line: dict[str, Any],
        config: Config,
        fingerprint: str,
        recovery: Recovery = Recovery(0, None),
    ) -> float:
        """Copies all to the host, writes it in the background, and returns the seconds that the copy took.

        The next save, or `wait`, ends when it is complete.
        """
        start = time.perf_counter()
        self.wait()
        self._writing = f"step_{int(state.step)}"
        extra = {"data": data, "config": dataclasses.asdict(config), "fingerprint": fingerprint, "line": line}
        extra["recovery"] = dataclasses.asdict(recovery)
        args = ocp.args.Composite(state=ocp.args.StandardSave(with_key_data(state)), extra=ocp.args.JsonSave(extra))
        try:
            self._manager.save(int(state.step), args=args, metrics=self._score(line), force=True)
        except (OSError, ValueError) as error:
            raise _cannot_save(self.directory, error) from error
        return time.perf_counter() - start

    def _set_incomplete_aside(self) -> None:
        for path in self.directory.glob("step_*"):
            # orbax itself removes the temporary directory of a save that was killed
            if ocp.utils.TMP_DIR_SUFFIX not in path.name and not is_complete(path):
                path.rename(_free_name(path.with_name(f"incomplete_{path.name}")))

    def _seal(self) -> None:
        """Orbax calls it when all is written and the directory has still its temporary name."""
        if not is_first():
            return
        for path in self.directory.glob(f"{self._writing}{ocp.utils.TMP_DIR_SUFFIX}*"):
            write_manifest(path)

    def _score(self, line: dict[str, Any]) -> dict[str, float] | None:
        """What the best one is chosen by; None for a step that did not measure it."""
        if self._best_metric is None:
            return None
        value = line.get(self._best_metric)
        measured = "critic/score/mean" in line and (
            not self._best_metric.startswith("val-") or any(name.startswith("val-") for name in line)
        )
        if self._best_metric not in line and measured:
            near = did_you_mean(self._best_metric, line)
            raise ConfigError(f"trainer.best_metric = {self._best_metric}: no step has such a metric{near}")
        return None if value is None or not math.isfinite(value) else {"value": value}

    def steps(self) -> list[int]:
        """Those that are complete."""
        return list(self._manager.all_steps())

    def newest(self) -> Path | None:
        """The newest complete one whose files are as they were written; damaged ones are set aside, with a note."""
        step = from_first(self._newest_whole)
        self._manager.reload()
        return None if step is None else self.directory / f"step_{step}"

    def _newest_whole(self) -> int | None:
        for step in sorted(self._manager.all_steps(), reverse=True):
            path = self.directory / f"step_{step}"
            if (fault := find_fault(path)) is None:
                return step
            path.rename(_free_name(path.with_name(f"damaged_{path.name}")))
            self.notes.append(f"{path.name} is damaged ({fault}): set aside, the checkpoint before it is used")
        return None

    def wait(self) -> None:
        """Until the last save is complete."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise _cannot_save(self.directory, error) from error

    def close(self) -> None:
        self.wait()
        self._manager.close()

    def find(self, resume: str) -> Path | None:
        """The checkpoint that trainer.resume means, or None for a new run. Raises ConfigError for a bad path."""
        if resume == "never":
            return None
        if resume == "auto":
            return self.newest()
        path = Path(resume).absolute()
        if not is_complete(path):
            raise ConfigError(f"trainer.resume = {resume}: valid is auto, never, or the path of a complete checkpoint")
        if (fault := find_fault(path)) is not None:
            raise UserError(f"trainer.resume = {resume}: this checkpoint is damaged ({fault})")
        return path

    def refuse_later(self, step: int) -> None:
        """Raises ConfigError where output_dir has checkpoints of a run that went further than `step`."""
        later = [s for s in self._manager.all_steps() if s > step]
        if later:
            raise ConfigError(
                f"trainer.output_dir: {self.directory} already holds step_{max(later)}, but trainer.resume starts from "
                f"step {step}: valid is trainer.resume = auto, or an output_dir without later checkpoints"
            )


def restore(path: Path, abstract_state: TrainState) -> Resumed:
    """Reads a checkpoint into the layout of `abstract_state` (shapes with shardings), whatever mesh wrote it."""
    args = ocp.args.Composite(
        state=ocp.args.StandardRestore(with_key_data(abstract_state)), extra=ocp.args.JsonRestore()
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        try:
            loaded = checkpointer.restore(path, args=args)
        except (ValueError, OSError, KeyError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            critic = "without a critic" if abstract_state.critic is None else "with a critic"
            raise UserError(
                f"{path}: this checkpoint cannot be restored into the configured model {critic} ({reason})"
            ) from None
    state, extra = loaded["state"], loaded["extra"]
    state = dataclasses.replace(state, key=jax.random.wrap_key_data(state.key))
    rates = extra["recovery"]["rates"]
    recovery = Recovery(extra["recovery"]["rollbacks"], None if rates is None else (rates[0], rates[1]))
    return Resumed(state, extra["data"], extra["config"], extra["fingerprint"], extra["line"], recovery)


def take(state: TrainState, first: TrainState | None, config: Config) -> TrainState:
    """The parts of a checkpoint's state that trainer.load_contents names; the others from a new run's `first` one,
    which may be None where nothing of it is used. A fixed KL coefficient is always the config's.
    """
    contents = config.trainer.load_contents
    if config.algorithm.kl_ctrl.type == "fixed":
        coef = jax.device_put(np.float32(config.algorithm.kl_ctrl.kl_coef), state.kl.coef.sharding)
        state = dataclasses.replace(state, kl=dataclasses.replace(state.kl, coef=coef))
    if first is None:
        return state
    parts = {"model": ("actor", "critic"), "optimizer": ("actor_opt", "critic_opt"), "controller": ("kl",)}
    fresh = [field for part, fields in parts.items() if part not in contents for field in fields]
    return dataclasses.replace(state, **{field: getattr(first, field) for field in fresh})


def check_resumable(resumed: Resumed, config: Config, fingerprint: str) -> list[str]:
    """The settings that differ from the checkpoint's, as lines.

    Raises UserError where the data or a setting of FIXED is not the same.
    """
    moves_on = "data" in config.trainer.load_contents
    if resumed.fingerprint != fingerprint and moves_on:
        raise UserError(
            "data.train_files: the prompts differ from those of the checkpoint, whose position in them would mean "
            "nothing: restore the files, start a new run with trainer.resume = never and another trainer.output_dir, "
            "or leave data out of trainer.load_contents"
        )
    changed = _differences(resumed.config, _plain(dataclasses.asdict(config)))
    for name, old, new in changed:
        if name in FIXED and (moves_on or not name.startswith("data")):
            raise ConfigError(f"{name} = {new}: a run resumed from this checkpoint must keep its {old}")
    lines = {name: f"{name}: {old!r} in the checkpoint, {new!r} now" for name, old, new in changed}
    started, adaptive = "algorithm.kl_ctrl.kl_coef", config.algorithm.kl_ctrl.type == "adaptive"
    if started in lines and adaptive and "controller" in config.trainer.load_contents:
        lines[started] += "; the adaptive coefficient goes on from the checkpoint's own"
    return [line for name, line in lines.items() if not name.startswith(SILENT)]


def is_complete(path: Path) -> bool:
    """Whether Orbax finished this directory."""
    return all((path / name).exists() for name in ("_CHECKPOINT_METADATA", "state/_METADATA", "extra/metadata"))


def with_key_data(state: TrainState) -> TrainState:
    """The same with the PRNG key as plain integers."""
    if isinstance(state.key, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, state.key)
        return dataclasses.replace(state, key=jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=state.key.sharding))
    return dataclasses.replace(state, key=jax.random.key_data(state.key))


def _plain(x: Any) -> Any:
    """As JSON gives it back: tuples are lists."""
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    return [_plain(value) for value in x] if isinstance(x, tuple | list) else x


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    found = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append((f"{prefix}{key}", a, b))
    return found


def _free_name(path: Path) -> Path:
    candidates = (path.with_name(f"{path.name}.{i}" if i else path.name) for i in range(10_000))
    return next(candidate for candidate in candidates if not candidate.exists())


def _cannot_save(directory: Path, error: OSError | ValueError) -> UserError:
    """tensorstore tells of a full disk with a ValueError, the reason at the end of its first line."""
    reason = error.strerror if isinstance(error, OSError) else f"{error}\n".splitlines()[0].rpartition(": ")[2]
    return UserError(f"{directory}: a checkpoint could not be written ({reason}); the last complete one is kept")
