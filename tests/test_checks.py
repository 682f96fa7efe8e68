"""Every setting that cannot work is refused in the user's words before anything is loaded."""

import ast
import dataclasses
import inspect
import itertools
import math
import typing
from pathlib import Path

import pytest

from jaxppo.checks import check, settings
from jaxppo.config import ActorConfig, Config, ConfigError, DataConfig, RolloutCorrectionConfig

BASE = Config(data=DataConfig(train_files=("train.parquet",)))


def changed(**settings):
    """`actor__lr=1` sets actor.lr; `algorithm__kl_ctrl__horizon=0` a nested one."""
    config = BASE
    for path, value in settings.items():
        config = replace(config, path.split("__"), value)
    return config


def replace(config, path, value):
    head, *rest = path
    return dataclasses.replace(config, **{head: replace(getattr(config, head), rest, value) if rest else value})


def test_the_defaults_pass_with_a_training_file():
    assert check(BASE) is BASE
    with pytest.raises(ConfigError, match=r"data\.train_files = \(\): valid is at least one"):
        check(Config())


POSITIVE = [
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "rollout.n",
    "rollout.val_n",
    "rollout.max_num_seqs",
    "rollout.temperature",
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
    "actor.max_tokens_per_device",
    "actor.clip_ratio_low",
    "actor.clip_ratio_high",
    "actor.grad_clip",
    "critic.grad_clip",
    "critic.cliprange_value",
    "algorithm.kl_ctrl.target_kl",
    "algorithm.kl_ctrl.horizon",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.max_ckpt_to_keep",
]
BAD = [
    *((name, value) for name in POSITIVE for value in (0, -1)),
    ("rollout.temperature", math.nan),
    ("rollout.temperature", math.inf),
    ("algorithm.kl_ctrl.target_kl", math.nan),
    ("algorithm.kl_ctrl.kl_coef", -0.1),
    ("rollout.val_temperature", -1.0),
    ("rollout.top_p", 0.0),
    ("rollout.top_p", 1.1),
    ("rollout.top_k", 0),
    ("rollout.val_top_k", 0),
    ("rollout.val_top_p", 0.0),
    ("rollout.val_n", 2),
    ("trainer.critic_warmup", -1),
    ("actor.tau_pos", 0.0),
    ("actor.policy_loss.clip_cov_ratio", 0.0),
    ("actor.policy_loss.clip_cov_ub", 0.5),
    ("algorithm.filter_groups.max_num_gen_batches", -1),
    ("rollout.top_k", -2),
    ("algorithm.gamma", 1.5),
    ("algorithm.lam", -0.1),
    ("algorithm.lam", math.nan),
    ("actor.clip_ratio_c", 1.0),
    ("actor.lr", -1e-6),
    ("critic.lr", math.inf),
    ("actor.betas", (0.9, 1.0)),
    ("critic.betas", (-0.1, 0.9)),
    ("actor.weight_decay", -0.01),
    ("actor.lr_warmup_steps", -1),
    ("actor.min_lr_ratio", 2.0),
    ("actor.entropy_coeff", -1.0),
    ("actor.kl_loss_coef", -1.0),
    ("trainer.critic_warmup", -1),
    ("trainer.save_freq", 0),
    ("trainer.test_freq", -2),
    ("data.train_max_samples", 0),
    ("data.val_max_samples", -3),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_one_line_names_the_setting_its_value_and_the_valid_ones(name, value):
    with pytest.raises(ConfigError) as caught:
        check(changed(**{name.replace(".", "__"): value}))
    message = str(caught.value)
    assert name in message
    assert str(value) in message
    assert "valid is" in message
    assert "\n" not in message


def test_indivisible_batches_name_both_settings_and_every_valid_size():
    with pytest.raises(ConfigError) as caught:
        check(changed(data__train_batch_size=10, actor__ppo_mini_batch_size=4))
    assert str(caught.value) == (
        "actor.ppo_mini_batch_size = 4 does not divide data.train_batch_size = 10: valid sizes are 1, 2, 5, 10"
    )
    for size in (1, 2, 5, 10):
        check(changed(data__train_batch_size=10, actor__ppo_mini_batch_size=size))


def test_a_row_holds_the_longest_sequence_and_a_device_a_row():
    with pytest.raises(ConfigError, match=r"actor\.row_length = 1023: must be at least .* = 1024"):
        check(changed(actor__row_length=1023))
    with pytest.raises(ConfigError, match=r"actor\.max_tokens_per_device = 1000: must be at least a row of 1024"):
        check(changed(actor__max_tokens_per_device=1000))
    check(changed(actor__row_length=1024, actor__max_tokens_per_device=1024))


def test_the_kl_is_a_penalty_or_a_loss():
    with pytest.raises(ConfigError, match=r"use_kl_in_reward and actor\.use_kl_loss are both true"):
        check(changed(algorithm__use_kl_in_reward=True, actor__use_kl_loss=True))


def test_an_adaptive_controller_can_move_but_not_jump_to_0():
    adaptive = {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"}
    check(changed(**adaptive))
    with pytest.raises(ConfigError, match=r"kl_coef = 0\.0: .* would never leave 0"):
        check(changed(**adaptive, algorithm__kl_ctrl__kl_coef=0.0))
    with pytest.raises(ConfigError, match=r"horizon = 204: valid is at least a fifth of the 1024 sequences"):
        check(changed(**adaptive, algorithm__kl_ctrl__horizon=204))
    check(changed(**adaptive, algorithm__kl_ctrl__horizon=205))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout.sleep_level", 1),
        ("rollout.tensor_parallel_size", 2),
        ("rollout.enforce_eager", True),
        ("rollout.gpu_memory_utilization", 0.6),
        ("rollout.max_num_batched_tokens", 4096),
    ],
)
def test_settings_of_vllm_are_refused_where_they_do_nothing(name, value):
    with pytest.raises(ConfigError, match=rf"{name} = {value}: valid is .* with rollout\.engine = jax: it is vLLM's"):
        check(changed(**{name.replace(".", "__"): value}))
    check(changed(**{name.replace(".", "__"): value}, rollout__engine="vllm"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("data.train_files", "x.parquet", "'x.parquet': valid is a tuple such as (x, y) or (x,), each a string"),
        ("data.train_files", ["x.parquet"], "['x.parquet']: valid is a tuple"),
        ("data.train_files", (1,), "(1,): valid is a tuple"),
        ("data.train_batch_size", 8.0, "8.0: valid is an integer"),
        ("data.train_batch_size", True, "True: valid is an integer"),
        ("data.train_batch_size", 10**400, ": valid is an integer of 32 bits"),
        ("data.shuffle", 1, "1: valid is True or False"),
        ("actor.lr", "3e-4", "'3e-4': valid is a number"),
        ("actor.lr", None, "None: valid is a number"),
        ("actor.lr", 10**400, ": valid is a number"),
        ("actor.betas", (0.9,), "(0.9,): valid is a tuple of 2, each a number"),
        ("actor.row_length", "20", "'20': valid is an integer of 32 bits or None"),
        ("critic.path", Path("x"), "PosixPath('x'): valid is a string or None"),
        ("rollout.sleep_level", True, "True: valid is 0, 1, 2"),
        ("rollout.offload", ("critc",), "('critc',): valid is a tuple such as (x, y) or (x,), each optimizer, critic"),
        ("algorithm.kl_ctrl.type", "adaptve", "'adaptve': valid is fixed, adaptive (did you mean adaptive?)"),
        ("critic", ActorConfig(), "valid is jaxppo.config.CriticConfig"),
        ("trainer.seed", -1, "-1: valid is an integer from 0 to 4294967295"),
        ("trainer.seed", 2**32, "4294967296: valid is an integer of 32 bits"),
        ("data.seed", -1, "-1: valid is an integer from 0 to 4294967295"),
    ],
)
def test_a_config_files_value_has_its_settings_type(name, value, message):
    with pytest.raises(ConfigError) as caught:
        check(changed(**{name.replace(".", "__"): value}))
    assert str(caught.value).startswith(f"{name} = ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_has_the_right_type_passes():
    whole = {"actor__betas": (0, 0.5), "algorithm__gamma": 1, "trainer__seed": 2**32 - 1, "data__seed": 0}
    check(changed(**whole, actor__row_length=None, rollout__offload=("critic", "optimizer")))


def test_every_setting_is_known_by_name():
    found = settings()
    assert found["actor.lr"] is float
    assert found["algorithm.kl_ctrl.horizon"] is int
    assert "algorithm.kl_ctrl" not in found


def sections(kind: type = Config) -> list[type]:
    """A section and all below it."""
    below = [k for k in typing.get_type_hints(kind).values() if isinstance(k, type) and dataclasses.is_dataclass(k)]
    return [kind, *(section for k in below for section in sections(k))]


@pytest.mark.parametrize("section", sections(), ids=lambda s: s.__name__)
def test_every_setting_has_a_line_of_help(section):
    """--help shows the docstring under a field."""
    (body,) = ast.parse(inspect.getsource(section)).body
    missing = []
    for field, following in itertools.pairwise([*body.body, ast.Pass()]):
        documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        is_setting = isinstance(field, ast.AnnAssign) and not ast.unparse(field.annotation).endswith("Config")
        if is_setting and not documented:
            missing.append(ast.unparse(field.target))
    assert missing == []


WITHOUT_CRITIC = {"algorithm__adv_estimator": "grpo", "rollout__n": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout__n": 1}, "rollout.n = 1: valid is 2 or more with algorithm.adv_estimator = grpo"),
        ({"critic__path": "x"}, "critic.path = x: valid is None with algorithm.adv_estimator = grpo"),
        ({"trainer__critic_warmup": 3}, "trainer.critic_warmup = 3: valid is 0 with"),
        ({"rollout__offload": ("critic",)}, "rollout.offload = ('critic',): valid is no critic with"),
        (
            {"actor__policy_loss__loss_mode": "gspo"},
            "actor.loss_agg_mode = token-mean: valid is seq-mean-token-mean with actor.policy_loss.loss_mode = gspo",
        ),
        (
            {"reward__overlong_buffer__enable": True},
            "reward.overlong_buffer.len = 0: valid is 1 to data.max_response_length = 512",
        ),
        *(
            (
                {
                    "algorithm__rollout_correction__rollout_rs": tests,
                    "algorithm__rollout_correction__rollout_rs_threshold": bounds,
                },
                "algorithm.rollout_correction.rollout_rs_threshold = (",
            )
            for tests, bounds in [
                (("token_k1",), ("x",)),
                (("token_k1",), ("2_0.5",)),
                (("token_k3",), ("0.1_0.5",)),
                (("token_k2",), ("0",)),
                (("token_k1", "token_k2"), ("2", "1", "3")),
            ]
        ),
    ],
)
def test_settings_that_do_not_go_together(change, message):
    with pytest.raises(ConfigError) as caught:
        check(changed(**(WITHOUT_CRITIC | change)))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_bounds_of_rejection_are_read_as_verl_writes_them():
    tests = ("token_k1", "seq_mean_k3", "seq_sum_k1")
    correction = RolloutCorrectionConfig(rollout_rs=tests, rollout_rs_threshold=("0.5_2.5", "0.01", "4"))
    assert [bounds[1:] for bounds in correction.rejections] == [(0.5, 2.5), (100.0, 0.01), (0.25, 4.0)]
    one_for_all = RolloutCorrectionConfig(rollout_rs=("token_k1", "token_k2"))
    assert one_for_all.rejections == (("token_k1", 0.5, 2.0), ("token_k2", 0.5, 2.0))
