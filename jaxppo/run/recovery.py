"""How a run gets back to a good state: what is saved when it fails, and the roll-back to a checkpoint."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from jaxppo.config import UserError
from jaxppo.run.checkpoint import Recovery, restore
from jaxppo.run.memory import bring_back
from jaxppo.run.setup import Run
from jaxppo.step.state import TrainState


def save(run: Run, state: TrainState, data: dict[str, Any], line: Mapping[str, Any]) -> float:
    """A checkpoint of a step with its line, and the roll-backs so far; seconds that the run has waited for it."""
    return run.checkpoints.save(state, data, dict(line), run.config, run.train.fingerprint, run.recovery)


@contextmanager
def saved_on_failure(run: Run, state: TrainState, line: Mapping[str, Any]) -> Iterator[None]:
    """Whatever ends a step before its update has begun, the state before it is saved, and its place in the data."""
    data = run.loader.state_dict()
    try:
        yield
    except BaseException:
        alive = not any(x.is_deleted() for x in jax.tree.leaves(state))
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
        raise UserError(f"the run would roll back once more than guards.max_rollbacks = {most}: it needs other settings")
    run.checkpoints.wait()
    path = run.checkpoints.newest()
    if path is None:
        raise UserError("there is no checkpoint to roll back to yet: a smaller trainer.save_freq makes one earlier")
    state = bring_back(state, run.config.rollout.offload)
    step = state.step + 1 - 1  # a buffer of its own
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    for x in jax.tree.leaves(state):
        x.delete()
    state = dataclasses.replace(restore(path, abstract).state, step=step)
    rates = run.programs.slow_down()
    run.recovery = Recovery(done + 1, run.programs.rates)
    run.engine.publish(state.actor, int(step))
    return state, f"rolled back to {path.name} ({done + 1} of {most}): {rates}; the data move on"
