"""The loop: prompts -> responses -> scores -> one packed batch -> one update -> new weights to the engine.

All that the algorithm remembers is in the TrainState; everything here can be thrown away and built again.
"""

import dataclasses
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import jax

from jaxppo.checks import check
from jaxppo.config import Config, UserError
from jaxppo.parallel.distributed import any_process, ending_together, from_first, is_first, start
from jaxppo.parallel.platform import keep_compilations, prepare
from jaxppo.run.collect import collect, make_rollouts, response_metrics
from jaxppo.run.console import Display
from jaxppo.run.guards import ROLLBACKS, Guards, gravest
from jaxppo.run.learning import learn
from jaxppo.run.memory import bring_back, process_metrics, send_away
from jaxppo.run.metrics import (
    Metrics,
    MetricsFile,
    Stopwatch,
    performance_metrics,
    to_line,
    write_file,
)
from jaxppo.run.preemption import Notice, Preempted, preemption
from jaxppo.run.recovery import roll_back, save, saved_on_failure
from jaxppo.run.report import plot_or_say
from jaxppo.run.setup import Run, build
from jaxppo.run.validation import accuracy_summary, validate
from jaxppo.step.state import TrainState


def train(config: Config) -> TrainState:
    """Runs PPO as configured and returns the last state; checkpoints, metrics and a plot lie in output_dir.

    Raises UserError for what the user must mend.
    """
    prepare(check(config))
    start(config.distributed)
    with ending_together():
        return _train(config)


def _train(config: Config) -> TrainState:
    processes, recorded = jax.process_count(), config.trainer.record_steps
    if recorded and processes > 1:
        raise UserError(f"trainer.record_steps = {recorded}: of a run of {processes} processes no step can be recorded")
    keep_compilations()
    run = build(config)
    config, state, output_dir = run.config, run.state, Path(run.config.trainer.output_dir)
    if is_first():
        write_file(output_dir / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    first_step, total_steps = int(state.step), config.trainer.total_training_steps or 0
    with (
        Display(total_steps, first_step) as display,
        closing(MetricsFile(output_dir / "metrics.jsonl" if is_first() else None, run.resumed)) as metrics_file,
        closing(run.checkpoints),
        closing(run.reward),
        preemption() as notice,
    ):
        for note in run.notes:
            display.say(note)
        if first_step < total_steps:
            display.say("the first step compiles the rollout, score and update programs (minutes for a large model)")
        run.engine.publish(state.actor, first_step)
        state = send_away(state, config.rollout.offload)
        if run.resumed is None and config.trainer.val_before_train and run.val is not None:
            metrics_file.write(to_line(0, _validate(run, state, display)))
        guards, line, ended = Guards(config, from_first(metrics_file.read)), run.resumed, False
        for step in range(first_step + 1, total_steps + 1):
            try:
                with saved_on_failure(run, state, line):
                    state, metrics = ppo_step(run, state, notice, display.say)
            except Preempted:
                break
            found = guards(metrics)
            worst = gravest(found)
            action = None if worst is None else worst.action
            lines = [alarm.line for alarm in found]
            if action == "rollback":
                state, text = roll_back(run, state)
                state = send_away(state, config.rollout.offload)
                guards.restart()
                lines.append(text)
            metrics[ROLLBACKS] = float(run.recovery.rollbacks)
            ended = step == total_steps or action == "stop"
            tested = run.val is not None and (ended or _is_due(step, config.trainer.test_freq))
            if tested:
                metrics |= _validate(run, state, display)
            line = to_line(step, metrics)
            preempted = any_process(notice.given)
            if ended or preempted or _is_due(step, config.trainer.save_freq):
                # with its line, so that no kill between the two can lose one of them
                line["timing_s/save_checkpoint"] = save(run, state, run.loader.state_dict(), line)
            metrics_file.write(line)
            display.step(step, metrics)
            if metrics["timing_s/compile"] > 1:
                display.say(f"  {metrics['timing_s/compile']:.1f} s of it compiled programs: tok/s leaves them out")
            for text in lines:
                display.say(text)
            if (tested or ended) and metrics_file.path is not None:
                plot_or_say(metrics_file.path, output_dir / "metrics.png", config.algorithm.kl_ctrl, display.say)
            if worst is not None and worst.action == "stop" and worst.guard != "plateau":
                raise UserError(
                    f"guards.{worst.guard} = stop: step {step} is saved, but the run should go on from an earlier "
                    f"checkpoint, with trainer.resume = its path and another trainer.output_dir ({worst.line})"
                )
            if ended or preempted:
                break
        if any_process(notice.given) and not ended:
            run.checkpoints.wait()
            steps = run.checkpoints.steps()
            display.say(f"SIGTERM: step {max(steps, default=0)} is saved; the same command goes on from it")
        display.say(accuracy_summary(metrics_file.read()))
    return bring_back(state, config.rollout.offload)


def ppo_step(run: Run, state: TrainState, notice: Notice, say: Callable[[str], None]) -> tuple[TrainState, Metrics]:
    """One PPO step; the given state is donated to the next. The host waits for the update only at its end.

    Between updates, what rollout.offload names lies in host memory. Raises Preempted before the update, while the
    given state is whole, if the notice has come.
    """
    config, watch = run.config, Stopwatch()
    key = jax.random.fold_in(state.key, state.step)
    step = int(state.step) + 1
    epoch = run.loader.epoch
    responses, collected = collect(run, key, watch)
    notice.check()
    rollouts = make_rollouts(responses, config)
    state, metrics = learn(run, state, rollouts, watch, say)
    metrics |= collected | response_metrics(responses, config)
    with watch("publish"):
        metrics["perf/publish_bytes"] = float(run.engine.publish(state.actor, step))
    with watch("offload"):
        state = send_away(state, config.rollout.offload)
    metrics["guards/out_of_memory"] = float(run.out_of_memory)
    metrics |= {"training/global_step": float(step), "training/epoch": float(epoch)} | process_metrics()
    timing = watch.metrics()
    tokens = sum(len(r.prompt) for r in rollouts), sum(len(r.response) for r in rollouts)
    return state, metrics | timing | watch.memory | performance_metrics(timing, *tokens, run.mesh.size)


def _validate(run: Run, state: TrainState, display: Display) -> Metrics:
    """Scores of the current policy on the validation prompts, shown and returned."""
    assert run.val is not None
    watch = Stopwatch()
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), 1)
    show = run.config.trainer.log_val_generations
    with watch("testing"):
        metrics, samples = validate(run.engine, run.tokenizer, run.reward, run.val.prompts, run.val_sampling, key, show)
    metrics["timing_s/testing"] = watch.seconds["testing"] + watch.seconds["compile"]
    display.validation(int(state.step), metrics, samples)
    return metrics


def _is_due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0
