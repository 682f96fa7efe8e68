"""Each guard trips where its threshold says, and only there."""

import math

import pytest

from jaxppo.checks import check
from jaxppo.config import Config, ConfigError, DataConfig, GuardsConfig, RolloutConfig
from jaxppo.run.guards import Guards, gravest
from tests.run.world import change

HEALTHY = {
    "training/rollout_logp_diff_mean": 0.01,
    "actor/skipped_updates": 0.0,
    "critic/skipped_updates": 0.0,
    "actor/reward_kl_penalty": 0.05,
    "critic/score/mean": 0.8,
    "actor/entropy": 1.0,
    "critic/vf_explained_var": 0.5,
    "actor/grad_norm": 1.0,
    "critic/grad_norm": 2.0,
    "actor/pg_loss": 0.1,
    "critic/vf_loss": 0.2,
}


def guards(**settings) -> Guards:
    return Guards(Config(guards=GuardsConfig(**{"window": 3, **settings})))


def tripped(guards: Guards, *steps: dict) -> list[list[str]]:
    """The names of each step's alarms; a step is what differs from a healthy one."""
    return [[alarm.guard for alarm in guards(HEALTHY | step)] for step in steps]


def test_a_healthy_run_hears_nothing():
    losses = [{"actor/pg_loss": 0.1 + 0.01 * i} for i in range(8)]
    assert tripped(guards(plateau="stop"), *losses) == [[]] * 8


@pytest.mark.parametrize(
    ("step", "names"),
    [
        ({"training/rollout_logp_diff_mean": 0.2}, ["mismatch"]),
        ({"training/rollout_logp_diff_mean": math.nan}, ["mismatch"]),
        ({"training/rollout_logp_diff_mean": 0.1}, []),
        ({"critic/skipped_updates": 2.0}, ["nonfinite"]),
        ({"actor/reward_kl_penalty": 0.21}, ["kl"]),
        ({"actor/reward_kl_penalty": 0.2}, []),
        ({"actor/reward_kl_penalty": math.nan}, []),
        ({"actor/grad_norm": 5.1}, ["grad_norm"]),
        ({"critic/grad_norm": 5.0}, []),
    ],
)
def test_one_step_is_enough(step, names):
    assert tripped(guards(grad_norm_max=5.0), step) == [names]


@pytest.mark.parametrize(
    ("metric", "bad", "name"),
    [
        ("actor/reward_kl_penalty", 0.001, "kl_min"),
        ("actor/entropy", 0.001, "entropy"),
        ("critic/vf_explained_var", -1.5, "explained_variance"),
    ],
)
def test_a_window_is_judged_once_it_is_full_and_told_once(metric, bad, name):
    steps = [{metric: bad}] * 5 + [{}] * 3 + [{metric: bad}] * 3
    assert tripped(guards(), *steps) == [[], [], [name], [], [], [], [], [], [], [], [name]]


def test_a_reward_that_falls_below_half_of_its_best_window():
    """Best window 0.8: (0.8 + 0.8 + 0) / 3 = 0.53 is above 0.4, (0.8 + 0 + 0) / 3 = 0.27 is below."""
    low = {"critic/score/mean": 0.0}
    assert tripped(guards(), {}, {}, {}, low, low, low) == [[], [], [], [], ["reward"], []]
    assert tripped(guards(reward=None), {}, {}, {}, low, low, low) == [[]] * 6


def test_a_norm_is_held_against_the_median_of_the_window_before():
    """Median of 1, 9, 1 is 1: the limit is 10."""
    norms = [{"actor/grad_norm": x} for x in (1.0, 9.0, 1.0, 10.0, 10.1)]
    assert tripped(guards(), *norms) == [[], [], [], [], []]  # the last one's median is 9
    assert tripped(guards(), *norms[:3], norms[4]) == [[], [], [], ["grad_norm"]]


def test_a_plateau_ends_the_run_only_where_it_is_asked_for():
    assert tripped(guards(), *[{}] * 4) == [[]] * 4
    still = guards(plateau="stop")
    assert tripped(still, {}, {}) == [[], []]
    (alarm,) = still(HEALTHY)
    assert (alarm.guard, alarm.action) == ("plateau", "stop")
    assert tripped(guards(plateau="stop"), {}, {}, {"critic/vf_loss": 0.2002}) == [[], [], []]


def test_a_resume_remembers_what_the_lines_say():
    steps = [{}, {}, {}, {"critic/score/mean": 0.0}]
    lines = [{"step": 0}] + [{"step": i + 1, "unknown": None} | HEALTHY | s for i, s in enumerate(steps)]
    resumed = Guards(Config(guards=GuardsConfig(window=3)), lines)
    assert tripped(resumed, {"critic/score/mean": 0.0}) == [["reward"]]
    lines[-1]["guards/rollbacks"] = 1.0
    rolled_back = Guards(Config(guards=GuardsConfig(window=3)), lines)
    assert tripped(rolled_back, {"critic/score/mean": 0.0}) == [[]]


def test_the_gravest_action_wins_and_lasts():
    found = guards(kl="rollback", mismatch="skip", nonfinite="log")
    bad = {"actor/reward_kl_penalty": 1.0, "training/rollout_logp_diff_mean": 1.0, "actor/skipped_updates": 1.0}
    for _ in range(2):
        worst = gravest(found(HEALTHY | bad))
        assert worst is not None
        assert (worst.guard, worst.action) == ("kl", "rollback")
    assert gravest([]) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kl": "skip"}, r"guards\.kl = 'skip'"),
        ({"grad_norm": "skip"}, r"guards\.grad_norm_max = None: valid is a number > 0 with guards\.grad_norm = skip"),
        ({"window": 0}, r"guards\.window = 0"),
        ({"reward_drop": 1.5}, r"guards\.reward_drop = 1\.5"),
        ({"rollback_lr": 0.0}, r"guards\.rollback_lr = 0\.0"),
    ],
)
def test_settings_are_checked(settings, words):
    config = Config(data=DataConfig(train_files=("x.parquet",)), guards=GuardsConfig(**settings))
    with pytest.raises(ConfigError, match=words):
        check(config)


def test_a_limit_of_the_mismatch_is_the_rollouts():
    config = change(Config(rollout=RolloutConfig(max_logp_diff=0.5)), "guards", window=3)
    assert tripped(Guards(config), {"training/rollout_logp_diff_mean": 0.4}) == [[]]
