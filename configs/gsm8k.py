"""verl's GSM8K quickstart for Qwen2.5-0.5B-Instruct, with the KL penalty in the reward under an adaptive controller.

One GPU with 80 GB or more; rollouts from vLLM (docs/vllm.md), or with --rollout.engine jax from the built-in engine.
Data: python scripts/prepare_gsm8k.py. Not yet run to the end here: no result is claimed.
"""

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


def config() -> Config:
    return Config(
        model=ModelConfig(path="Qwen/Qwen2.5-0.5B-Instruct"),
        data=DataConfig(
            train_files=("data/gsm8k/train.parquet",),
            val_files=("data/gsm8k/test.parquet",),
            train_batch_size=256,
            max_prompt_length=512,
            max_response_length=512,
            filter_overlong_prompts=True,
        ),
        rollout=RolloutConfig(engine="vllm"),
        algorithm=AlgorithmConfig(
            gamma=1.0,
            lam=0.95,
            use_kl_in_reward=True,
            kl_penalty="kl",
            kl_ctrl=KLControlConfig(type="adaptive", kl_coef=0.005, target_kl=0.1, horizon=10000),
        ),
        actor=ActorConfig(lr=1e-6, ppo_mini_batch_size=64),
        critic=CriticConfig(lr=1e-5),
        reward=RewardConfig(function="gsm8k"),
        trainer=TrainerConfig(output_dir="runs/gsm8k", total_epochs=15, save_freq=50, test_freq=10),
    )
