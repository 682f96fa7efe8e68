"""The shipped configs: each is accepted, and says what its docstring and the project's README say of it."""

import dataclasses
import re
import shlex

import pytest

from jaxppo.checks import check
from jaxppo.cli import load_config, read_config_file
from jaxppo.config import Config, KLControlConfig
from tests.end_to_end.test_quickstart import ROOT
from tests.end_to_end.test_smollm2_gsm8k import FLAGS

CONFIGS = sorted((ROOT / "configs").glob("*.py"))


def read(name: str) -> Config:
    return read_config_file(ROOT / "configs" / name)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_it_is_accepted_wherever_the_command_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(read_config_file(path))


@pytest.mark.parametrize("path", [p for p in CONFIGS if "grpo" not in p.name], ids=lambda p: p.name)
def test_it_shows_the_kl_recipe_of_the_source(path):
    algorithm = read_config_file(path).algorithm
    assert algorithm.use_kl_in_reward
    assert algorithm.kl_ctrl == KLControlConfig(type="adaptive", kl_coef=0.005, target_kl=0.1, horizon=10000)
    assert (algorithm.gamma, algorithm.lam) == (1.0, 0.95)


def test_grpo_is_the_quickstart_without_a_critic():
    """verl's GRPO recipe: the KL is a loss, with coefficient 0.001 and k3; as many responses a step as 8 a prompt."""
    c, base = read("quickstart_grpo.py"), read("quickstart.py")
    assert not c.needs_critic
    assert (c.algorithm.adv_estimator, c.algorithm.use_kl_in_reward, c.rollout.n) == ("grpo", False, 8)
    assert (c.actor.use_kl_loss, c.actor.kl_loss_coef, c.actor.kl_loss_type) == (True, 0.001, "low_var_kl")
    assert (c.model, c.data.train_files) == (base.model, base.data.train_files)


def test_gsm8k_is_verls_quickstart():
    c = read("gsm8k.py")
    assert c.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (c.data.train_batch_size, c.data.max_prompt_length, c.data.max_response_length) == (256, 512, 512)
    assert (c.actor.ppo_mini_batch_size, c.actor.lr, c.critic.lr) == (64, 1e-6, 1e-5)
    assert (c.trainer.total_epochs, c.reward.function) == (15, "gsm8k")


def test_smollm2_is_the_same_job():
    c, base = read("gsm8k_smollm2.py"), read("gsm8k.py")
    assert c.model.path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    for section in ("data", "rollout", "algorithm", "critic", "reward", "mesh"):
        assert getattr(c, section) == getattr(base, section)
    assert dataclasses.replace(c.actor, lr=base.actor.lr) == base.actor


def test_the_cpu_overrides_of_its_docstring_are_those_that_are_tested():
    """The end-to-end test reads the raw GSM8K files and writes elsewhere; the rest is the docstring's command."""
    source = (ROOT / "configs" / "gsm8k_smollm2.py").read_text()
    command = re.search(r"python -m jaxppo\.train(.*?)\"\"\"", source, re.DOTALL)
    assert command is not None
    words = shlex.split(command.group(1).replace("\\\\\n", " "))
    written = dict(zip((w.removeprefix("--") for w in words[::2]), words[1::2], strict=True))
    assert (written.pop("config"), written.pop("model.path")) == ("configs/gsm8k_smollm2.py", "FOLDER")
    tested = {name: str(value) for name, value in FLAGS.items() if name not in ("data.train-files", "data.val-files")}
    assert written == tested
    check(load_config(["--config", str(ROOT / "configs" / "gsm8k_smollm2.py"), *words[2:]]))
