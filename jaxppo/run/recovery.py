"""How a run gets back to a good state: what is saved when it fails, and the roll-back to a checkpoint."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jaxppo.config import UserError
from jaxppo.run.checkpoint import Recovery, restore
from jaxppo.run.memory import bring_back
from jaxppo.run.setup import Run
from jaxppo.step.state import TrainState


def save(run: Run, state: TrainState, data: dict[str, Any], line: Mapping[str, Any]) -> float:
    """A checkpoint of a step with its line, and the roll-backs so far; seconds that the run has waited for it."""
    return run.checkpoints.save(state, data, dict(line), run.config, run.train.fingerprint, run.recovery)


@contextmanager
def saved_on_failure(run: Run, state: TrainState, line: Mapping[str, Any] | None) -> Iterator[None]:
    """Whatever ends a step before its update has begun, the state before it is saved, and its place in the data."""
    data = run.loader.state_dict()
    try:
        yield
    except BaseException:
        # of several processes the others do not know yet, and would not take part in the save
        alone = jax.process_count() == 1
        alive = alone and not any(x.is_deleted() for x in jax.tree.leaves(state))
        if alive and line and int(state.step) not in run.checkpoints.steps():
            save(run, state, data, line)
        raise


def roll_back(run: Run, state: TrainState) -> tuple[TrainState, str]:
    """The parameters, moments and KL coefficient of the newest checkpoint, at the current step; and what was done.

    The step counter goes on: data, keys and schedules move on and nothing is replayed. Learning rates are lower from
    here on, and the engine has the old weights as a new version. The given state is dead afterwards.
    Raises UserError after guards.max_rollbacks of them.
    """
    done, most = run.recovery.rollbacks, run.config.guards.max_rollbacks
    if done >= most:
        raise UserError(f"guards.max_rollbacks = {most}: the run would roll back once more; it needs other settings")
    state, name = reload(run, bring_back(state, run.config.rollout.offload), int(state.step))
    rates = run.programs.slow_down()
    run.recovery = Recovery(done + 1, run.programs.rates)
    run.engine.publish(state.actor, int(state.step))
    return state, f"rolled back to {name} ({done + 1} of {most}): {rates}; the data move on"


def reload(run: Run, state: TrainState, step: int) -> tuple[TrainState, str]:
    """The newest checkpoint's state with another step number, in the layout of `state`, which is freed first; its name.

    Raises UserError where there is none.
    """
    run.checkpoints.wait()
    path = run.checkpoints.newest()
    if path is None:
        raise UserError("there is no checkpoint to go back to yet: a smaller trainer.save_freq makes one earlier")
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    for x in jax.tree.leaves(state):
        x.delete()
    found = restore(path, abstract).state
    counter = jax.device_put(np.int32(step), found.step.sharding)
    return dataclasses.replace(found, step=counter), path.name
