"""Writes the tiny folders and goldens that tests/models compare with: transformers and torch, float32, on the CPU.

    python -m tests.goldens.make_hf_goldens

Needs torch, which the tests do not. Each folder holds config.json, model.safetensors (bfloat16) and golden.npz: tokens,
logits, log-probabilities of tokens 1.. and the gradient of their mean with respect to every parameter.
"""

import copy
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

HERE = Path(__file__).parent
SIZES = {
    "hidden_size": 24,
    "head_dim": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS = {
    "qwen2_tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "llama_llama3": LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3),
    "llama_yarn": LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=YARN),
}


def main() -> None:
    for seed, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # biases and norms must not be all 0 and all 1
                    parameter.add_(0.2 * torch.randn_like(parameter))
                parameter.copy_(parameter.bfloat16())  # so that a bfloat16 file holds them exactly
        tokens = torch.randint(0, config.vocab_size, (2, 12))
        logits = model(tokens).logits
        logp = torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
        logp.mean().backward()
        folder = HERE / name
        copy.deepcopy(model).bfloat16().save_pretrained(folder)
        arrays = {"tokens": tokens, "logits": logits, "logp": logp}
        arrays |= {f"grad:{key}": p.grad for key, p in model.named_parameters()}
        np.savez_compressed(folder / "golden.npz", **{key: x.detach().numpy() for key, x in arrays.items()})


if __name__ == "__main__":
    main()
