"""A model folder, a data set and a reward small enough for a whole run to take seconds."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxppo.config import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    CriticConfig,
    DataConfig,
    KLControlConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
)
from tests.tiny import HF_CONFIG, VOCAB

SPECIAL = ("<bos>", "<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+=" + "abcdefghijklmnopqrstuvwxyz" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
REWARD = '''
def score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits: it differs between samples, so that there is something to learn."""
    return sum(c.isdigit() for c in solution_str) / 6
'''


def rows(n: int) -> list[dict[str, Any]]:
    """verl-format rows: single-digit sums."""
    return [
        {
            "data_source": "sums" if i % 2 else "more_sums",
            "prompt": [{"role": "user", "content": f"{i % 10}+{(3 * i + i // 10) % 10}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i % 10 + (3 * i + i // 10) % 10)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(n)
    ]


def write_rows(path: Path, table: list[dict[str, Any]]) -> str:
    pa.parquet.write_table(pa.Table.from_pylist(table), path)
    return str(path)


def make_folder(folder: Path) -> Path:
    """config.json and a tokenizer of one token a character; no weights: runs here start from random ones."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    vocabulary = dict(zip([*SPECIAL, *CHARACTERS[: VOCAB - len(SPECIAL)]], range(VOCAB), strict=False))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def make_world(folder: Path) -> Config:
    """10 prompts in batches of 4: 2 steps an epoch, 6 steps; adaptive KL in the reward, 2 epochs of 2 minibatches."""
    (folder / "reward.py").write_text(REWARD)
    return Config(
        model=ModelConfig(
            path=str(make_folder(folder / "model")), init="random", dtype="float32", remat="none", attention="xla"
        ),
        data=DataConfig(
            train_files=(write_rows(folder / "train.parquet", rows(10)),),
            val_files=(write_rows(folder / "val.parquet", rows(7)),),
            train_batch_size=4,
            max_prompt_length=4,
            max_response_length=6,
        ),
        rollout=RolloutConfig(n=2, max_num_seqs=16),
        algorithm=AlgorithmConfig(
            lam=0.95,
            use_kl_in_reward=True,
            kl_ctrl=KLControlConfig(type="adaptive", kl_coef=0.05, target_kl=0.01, horizon=100),
        ),
        actor=ActorConfig(lr=1e-2, ppo_mini_batch_size=2, ppo_epochs=2, max_tokens_per_device=20, row_length=20),
        critic=CriticConfig(lr=1e-2),
        reward=RewardConfig(function=f"{folder / 'reward.py'}:score", num_workers=1),
        trainer=TrainerConfig(
            output_dir=str(folder / "run"),
            total_training_steps=6,
            save_freq=1,
            test_freq=3,
            log_val_generations=1,
        ),
    )


def change(config: Config, section: str, **settings: Any) -> Config:
    """The config with settings of one section replaced."""
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **settings)})
