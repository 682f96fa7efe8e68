"""Responses and updates that survive running out of memory: with less of it, the same step is done again."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxppo.parallel.mesh import place_rows
from jaxppo.parallel.offload import to_device
from jaxppo.rollout.engine import Completion, Sampling
from jaxppo.rollout.jax_engine import JaxEngine
from jaxppo.run.guards import MISMATCH
from jaxppo.run.memory import bring_back
from jaxppo.run.metrics import Metrics, Stopwatch
from jaxppo.run.programs import is_out_of_memory
from jaxppo.run.recording import Recording
from jaxppo.run.recovery import reload
from jaxppo.run.setup import Run
from jaxppo.step.packing import Rollout, pack
from jaxppo.step.state import TrainState

SKIPPED = "guards/skipped_steps"
logger = logging.getLogger(__name__)
Say = Callable[[str], None]


def generate(run: Run, prompts: Sequence[Sequence[int]], sampling: Sampling, key: jax.Array) -> list[Completion]:
    """Responses; where the built-in engine runs out of memory, with fewer slots, which changes no token.

    vLLM reserves its memory when it starts: where it runs out of it later, the run ends.
    """
    while True:
        try:
            return run.engine.generate(prompts, sampling, key)
        except jax.errors.JaxRuntimeError as error:
            if not (is_out_of_memory(error) and isinstance(run.engine, JaxEngine)):
                raise
            logger.warning(run.engine.shrink())
            run.out_of_memory += 1


def learn(
    run: Run, state: TrainState, rollouts: list[Rollout], watch: Stopwatch, say: Say
) -> tuple[TrainState, Metrics]:
    """Packs, scores and updates; the given state is dead afterwards. Parts that were offloaded are back on the device.

    Out of memory builds the programs for smaller microbatches and does the same again, with the same gradients: the
    update is not even started where it would not fit. If it fails in mid-flight nevertheless, the state is lost: the
    newest checkpoint's takes its place, and this batch is left out.
    """
    following, known = int(state.step) + 1, {}
    state = bring_back(state, run.config.rollout.offload)
    while True:
        programs, config = run.programs, run.programs.config
        try:
            with watch("pack"):
                minibatches, longest = config.minibatches_per_epoch, config.max_sequence_length
                packed = pack(rollouts, config.row_length, programs.rows, minibatches=minibatches, longest=longest)
                batch = place_rows(packed, run.mesh)
            with watch("score"):
                experience = programs.score(state, to_device(run.reference), batch)
                known = jax.block_until_ready(experience).metrics
            with watch("update"):
                skipped = config.guards.mismatch == "skip" and not (
                    float(known[MISMATCH]) <= config.rollout.max_logp_diff
                )
                if skipped:
                    next_state, metrics = _pass_over(state), known
                else:
                    programs.check_room(state, experience)
                    recording = None
                    if following in config.trainer.record_steps:
                        recording = Recording(config.trainer.output_dir, following, state, packed)
                    next_state, metrics = jax.block_until_ready(programs.update(state, experience))
                    if recording is not None:
                        recording.finish(next_state, metrics, config, run.mesh)
                break
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            say(programs.shrink())
            run.out_of_memory += 1
            if any(x.is_deleted() for x in jax.tree.leaves(state)):
                state, name = reload(run, state, following)
                say(f"the update had begun and its state is lost: {name} takes its place, this batch is left out")
                next_state, metrics, skipped = state, known, True
                break
    if skipped and following in run.config.trainer.record_steps:
        say(f"trainer.record_steps: step {following} made no update, so there is nothing to record")
    numbers = {name: float(x) for name, x in jax.device_get(metrics).items()}
    return next_state, numbers | {SKIPPED: float(skipped)}


def _pass_over(state: TrainState) -> TrainState:
    """Only the step has been counted."""
    step: Any = state.step + 1
    return dataclasses.replace(state, step=jax.device_put(step, state.step.sharding))
