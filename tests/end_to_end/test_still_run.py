"""20 whole steps with learning rate 0, engine and all: nothing may move, compile again, pile up or be misnamed."""

import dataclasses
import gc
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxppo.run import trainer
from jaxppo.run.metrics import read_metrics
from jaxppo.run.setup import build
from tests.run.world import change, make_world
from tests.tiny import VOCAB

STEPS = 50
STATISTICS = ("mean", "max", "min")
VERL_NAMES = {
    *(f"critic/{x}/{y}" for x in ("score", "rewards", "advantages", "returns", "values") for y in STATISTICS),
    *(f"critic/{x}" for x in ("vf_loss", "vf_clipfrac", "vf_explained_var", "vpred_mean", "grad_norm", "lr")),
    *(f"actor/{x}" for x in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "grad_norm", "lr")),
    *("actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff"),
    *(f"{x}_length/{y}" for x in ("response", "prompt") for y in ("mean", "max", "min", "clip_ratio")),
    *("training/global_step", "training/epoch"),
    *(f"training/rollout_probs_diff_{x}" for x in ("mean", "max", "std")),
    *(f"timing_s/{x}" for x in ("gen", "reward", "pack", "score", "update", "publish", "step")),
    *("perf/throughput", "perf/total_num_tokens", "perf/time_per_step", "reward/errors"),
}  # fmt: skip


@dataclasses.dataclass
class Watched:
    first: Any
    last: Any
    lines: list[dict[str, Any]]
    traces: list[int]
    """Programs traced in each step."""
    arrays: list[int]
    """Live device arrays after each step."""
    output_dir: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Watched:
    config = make_world(tmp_path_factory.mktemp("world"))
    config = change(config, "actor", lr=0.0)
    config = change(config, "critic", lr=0.0)
    config = change(config, "trainer", total_training_steps=STEPS, save_freq=-1, test_freq=10)
    fresh = build(change(config, "trainer", output_dir=f"{config.trainer.output_dir}_fresh")).state
    first = jax.tree.map(np.asarray, (fresh.actor, fresh.critic))
    del fresh
    ppo_step, traces, arrays, count = trainer.ppo_step, [], [], [0]

    def count_trace(event: str, seconds: float, **_: Any) -> None:
        count[0] += event == "/jax/core/compile/jaxpr_trace_duration"

    def watched_step(*args: Any) -> Any:
        before = count[0]
        result = ppo_step(*args)
        gc.collect()
        traces.append(count[0] - before)
        arrays.append(len(jax.live_arrays()))
        return result

    jax.monitoring.register_event_duration_secs_listener(count_trace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "ppo_step", watched_step)
        state = trainer.train(config)
    last = jax.tree.map(np.asarray, (state.actor, state.critic))
    output_dir = Path(config.trainer.output_dir)
    return Watched(first, last, read_metrics(output_dir / "metrics.jsonl"), traces, arrays, output_dir)


def test_parameters_are_bit_identical(run):
    jax.tree.map(np.testing.assert_array_equal, run.last, run.first)


def test_ratio_and_kl_are_exactly_constant(run):
    for line in run.lines[1:]:
        assert line["actor/ppo_kl"] == 0
        assert line["actor/pg_clipfrac"] == line["critic/vf_clipfrac"] == 0
        assert line["actor/reward_kl_penalty"] == 0
        assert line["critic/rewards/mean"] == pytest.approx(line["critic/score/mean"], rel=1e-6)


def test_the_controller_moves_once_a_step_after_use(run):
    """KL 0 is under the target: each step multiplies by 1 - 0.2 * 8 sequences / horizon 100."""
    for i, line in enumerate(run.lines[1:]):
        assert line["actor/reward_kl_penalty_coeff"] == pytest.approx(0.05 * (1 - 0.2 * 8 / 100) ** i, rel=1e-5)


def test_every_step_has_verls_names_and_plausible_values(run):
    assert [line["step"] for line in run.lines] == list(range(STEPS + 1))
    for line in run.lines[1:]:
        assert VERL_NAMES - line.keys() == set()
        assert all(isinstance(x, int | float) and math.isfinite(x) for x in line.values())
        assert 0 <= line["actor/entropy"] <= math.log(VOCAB)
        for name in ("response_length/clip_ratio", "prompt_length/clip_ratio", "actor/pg_clipfrac"):
            assert 0 <= line[name] <= 1
        assert line["training/epoch"] == (line["step"] - 1) // 2
        assert line["actor/lr"] == line["critic/lr"] == 0
        assert line["training/rollout_logp_diff_max"] < 1e-4
    tested = [line["step"] for line in run.lines if "val-core/sums/acc/mean@1" in line]
    assert tested == list(range(0, STEPS + 1, 10))
    assert "timing_s/save_checkpoint" in run.lines[-1]
    assert len({line["val-core/sums/acc/mean@1"] for line in run.lines if line["step"] in tested}) == 1


def test_nothing_is_traced_again_and_nothing_piles_up(run):
    assert run.traces[0] > 0
    assert run.traces[3:] == [0] * (STEPS - 3)
    assert len(set(run.arrays[3:])) == 1
    for name in ("perf/compilations", "perf/live_arrays_gib"):
        assert len({line[name] for line in run.lines[4:]}) == 1


def test_what_lies_in_the_output_directory(run):
    assert {path.name for path in run.output_dir.iterdir()} == {
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "metrics.png",
    }
    assert [path.name for path in (run.output_dir / "checkpoints").iterdir()] == [f"step_{STEPS}"]
