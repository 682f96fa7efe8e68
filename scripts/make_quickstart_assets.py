"""Makes jaxppo/assets/quickstart: the tiny model, tokenizer and sums that configs/quickstart.py starts from.

usage: python scripts/make_quickstart_assets.py [OUT_DIR]   (about 5 minutes on 2 cores; the same files each time)

The model learns two-digit addition from a careless tutor, who forgets each carry two times out of three. So the
skill is in its distribution but not in its mode: greedy answers are right only where nothing is carried.
"""

import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxppo.models import Architecture, load
from jaxppo.models.huggingface import save_folder
from jaxppo.models.logprobs import token_logprobs
from jaxppo.step.packing import Rollout, pack
from jaxppo.step.state import microbatch

VOCABULARY = ["<pad>", "<eos>", *"0123456789+="]
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FORGETS = 2 / 3
STEPS, BATCH = 1500, 256


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    make_tokenizer().save_pretrained(out)
    pairs = np.array([(a, b) for a in range(10, 100) for b in range(10, 100)])
    pairs = np.random.default_rng(0).permutation(pairs)
    held_out, train = pairs[:500], pairs[500:]
    for split, rows in {"train": train, "test": held_out}.items():
        table = pa.Table.from_pylist([make_row(split, i, a, b) for i, (a, b) in enumerate(rows.tolist())])
        pq.write_table(table, out / f"{split}.parquet")
    model = load(Architecture.from_folder(out), jax.random.key(0), dtype="float32", remat="none", attention="xla")
    params = learn(model, train)
    save_folder(out, model.config, params, source=out)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; the chat template is the question itself."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def make_row(split: str, index: int, a: int, b: int) -> dict:
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": index},
    }


def tutor(a: int, b: int, rng: np.random.Generator) -> str:
    """a + b, each carry forgotten with probability FORGETS."""
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + (ones >= 10 and rng.random() >= FORGETS)
    hundreds = tens >= 10 and rng.random() >= FORGETS
    return str(100 * hundreds + 10 * (tens % 10) + ones % 10)


def learn(model, pairs: np.ndarray):
    """Maximum likelihood of the tutor's answers."""
    tx = optax.adamw(optax.cosine_decay_schedule(4e-3, STEPS), weight_decay=0.01)
    rng = np.random.default_rng(1)
    ids = {token: i for i, token in enumerate(VOCABULARY)}

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        def loss(params):
            logp, _ = token_logprobs(model, params, batch, 1.0)
            return -jnp.sum(logp, where=batch.mask) / jnp.sum(batch.mask)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params, opt_state = model.params, tx.init(model.params)
    for i in range(STEPS):
        rollouts = []
        for a, b in pairs[rng.integers(0, len(pairs), BATCH)].tolist():
            answer = [*(ids[c] for c in tutor(a, b, rng)), ids["<eos>"]]
            question = np.array([ids[c] for c in f"{a}+{b}="], np.int32)
            rollouts.append(Rollout(question, np.array(answer, np.int32), np.zeros(len(answer), np.float32), 0.0))
        batch = jax.tree.map(jnp.asarray, microbatch(pack(rollouts, 10, rows=BATCH, longest=10), 0, 0))
        params, opt_state, value = step(params, opt_state, batch)
        if i % 250 == 0 or i == STEPS - 1:
            print(f"step {i}  loss {float(value):.4f}", flush=True)
    return params


if __name__ == "__main__":
    default = Path(__file__).parent.parent / "jaxppo" / "assets" / "quickstart"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
