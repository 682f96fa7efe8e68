"""The GSM8K recipe of configs/gsm8k.py for SmolLM2-135M-Instruct: small enough to try on any GPU, or on a CPU.

Two real steps on a CPU (a folder in place of the hub id saves the download):

    python -m jaxppo.train --config configs/gsm8k_smollm2.py --model.path FOLDER --model.dtype float32 \\
        --rollout.engine jax --rollout.max-num-seqs 4 \\
        --data.train-batch-size 4 --actor.ppo-mini-batch-size 2 --data.max-prompt-length 160 \\
        --data.max-response-length 24 --actor.max-tokens-per-device 368 --actor.row-length 184 \\
        --data.train-max-samples 64 --data.val-max-samples 4 --trainer.total-training-steps 2
"""

import dataclasses
from pathlib import Path

from jaxppo.cli import read_config_file
from jaxppo.config import Config


def config() -> Config:
    base = read_config_file(Path(__file__).with_name("gsm8k.py"))
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, path="HuggingFaceTB/SmolLM2-135M-Instruct"),
        actor=dataclasses.replace(base.actor, lr=3e-6),
        trainer=dataclasses.replace(base.trainer, output_dir="runs/gsm8k_smollm2"),
    )
