"""The quickstart's careless adder learns to carry by GRPO: 8 responses to each sum, compared with each other.
There is no critic.

Measured on two CPU cores, one seed: accuracy on 500 held-out sums, greedy: 0.274 before, 0.966 after 15 steps, 1.000
after 45 and 0.992 after 60 (512 responses a step; 1 to 3 s a step on a busy machine, after compilation).
"""

import dataclasses
from pathlib import Path

from jaxppo.cli import read_config_file
from jaxppo.config import AlgorithmConfig, Config, CriticConfig


def config() -> Config:
    base = read_config_file(Path(__file__).with_name("quickstart.py"))
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, train_batch_size=64),
        rollout=dataclasses.replace(base.rollout, n=8),
        algorithm=AlgorithmConfig(adv_estimator="grpo"),
        actor=dataclasses.replace(base.actor, ppo_mini_batch_size=16, use_kl_loss=True, kl_loss_coef=0.001),
        critic=CriticConfig(),
        trainer=dataclasses.replace(base.trainer, output_dir="runs/quickstart_grpo"),
    )
