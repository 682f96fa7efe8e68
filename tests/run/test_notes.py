"""What is said before the first step."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from jaxppo.config import AlgorithmConfig, Config, DataConfig, KLControlConfig, TrainerConfig
from jaxppo.run.notes import controller_notes, resume_notes


def config(steps: int, control: str = "adaptive", in_reward: bool = True) -> Config:
    """16 sequences a step, a horizon of 1000."""
    return Config(
        data=DataConfig(train_batch_size=16),
        algorithm=AlgorithmConfig(use_kl_in_reward=in_reward, kl_ctrl=KLControlConfig(type=control, horizon=1000)),
        trainer=TrainerConfig(total_training_steps=steps),
    )


def test_a_horizon_longer_than_the_run_is_told():
    (note,) = controller_notes(config(10))
    assert "algorithm.kl_ctrl.horizon = 1000 sequences, but the whole run has 160" in note
    assert "at most 1.032" in note  # 1.0032 ** 10
    assert len(controller_notes(config(62))) == 1
    assert controller_notes(config(63)) == []


@pytest.mark.parametrize("other", [{"control": "fixed"}, {"in_reward": False}])
def test_without_an_adaptive_penalty_nothing_is_told(other):
    assert controller_notes(config(10, **other)) == []


def test_a_resumed_cosine_with_another_end_is_told():
    cosine = replace(config(10), actor=replace(Config().actor, lr_scheduler="cosine"))
    old = asdict(replace(cosine, trainer=TrainerConfig(total_training_steps=6)))
    first, second = resume_notes(Path("run/step_3"), old, cosine)
    assert "resuming from run/step_3" in first
    assert "trainer.resume = never" in first
    assert second.startswith("trainer.total_training_steps: 6 in the checkpoint, 10 now: the cosine of actor.lr is")
    assert len(resume_notes(Path("run/step_3"), asdict(cosine), cosine)) == 1
    assert len(resume_notes(Path("run/step_3"), old, config(10))) == 1
