"""Hugging Face folders in and out: safetensors by the names in the one table of parameters."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (gives NumPy its bfloat16)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxppo.config import UserError
from jaxppo.models.config import Architecture
from jaxppo.models.heads import abstract_value_head
from jaxppo.models.parameters import Params, at, build_tree, declare

SHARD_BYTES = 4 << 30
CARRIED_FILES = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt",
                 "added_tokens.json", "chat_template*")  # fmt: skip
VALUE_HEAD = {"score.weight": "kernel", "score.bias": "bias"}
"""The value head's names in a folder, each with one label in front, and in the parameter tree."""
ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2"}


MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def resolve_folder(path: str, setting: str = "model.path", patterns: Sequence[str] = MODEL_FILES) -> Path:
    """A local folder as it is; otherwise the hub id's files of these names, downloaded once.

    Raises UserError where there is neither.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=list(patterns)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{setting} = {path}: not a folder, and not to be had from the hub ({reason})") from None


def to_hf(architecture: Architecture, params: Params) -> Iterator[tuple[str, Any]]:
    """(name, tensor) in Hugging Face's names and shapes, one layer's tensor at a time; a tied head is left out.

    Works on host and on device arrays alike; a tensor is a slice and a reshape of a parameter.
    """
    for path, p in declare(architecture).items():
        x = at(params, path)
        for layer in range(architecture.num_layers) if p.stacked else ():
            yield p.name.format(layer=layer), x[layer].reshape(p.flat)
        if not p.stacked:
            yield p.name, x.reshape(p.flat)


def load_params(folder: Path, architecture: Architecture, dtype: Any, *, critic: bool = False) -> Params:
    """The folder's parameters as host arrays. Raises UserError naming what is missing, unexpected or misshapen.

    A critic gets a value head, float32: the folder's `score`, as an exported critic or a classifier of one label has
    it, or zeros. Its output matrix, which it does not use, may be missing: zeros.
    """
    setting = "critic.path" if critic else "model.path"
    files = _tensor_files(folder, setting)
    expected = {
        name: p.flat
        for p in declare(architecture).values()
        for name in ([p.name.format(layer=i) for i in range(architecture.num_layers)] if p.stacked else [p.name])
    }
    optional = {"lm_head.weight", *VALUE_HEAD} if critic else set()
    if critic:
        value_head = abstract_value_head(architecture)
        expected |= {name: (1, *value_head[key].shape) for name, key in VALUE_HEAD.items()}
    if missing := sorted(expected.keys() - files.keys() - optional):
        raise UserError(f"{setting} = {folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    extra = sorted(files.keys() - expected.keys() - {"lm_head.weight"})
    if extra := [name for name in extra if not name.endswith("rotary_emb.inv_freq")]:
        raise UserError(f"{setting} = {folder}: {len(extra)} unexpected tensors, the first is {extra[0]}")

    def read(name: str, dtype: Any = dtype) -> np.ndarray:
        if name not in files:
            return np.zeros(expected[name], dtype)
        with safe_open(files[name], "np") as file:
            tensor = file.get_tensor(name)
        if tensor.shape != expected.get(name, tensor.shape):
            raise UserError(f"{setting} = {folder}: {name} is {tensor.shape}, it must be {expected[name]}")
        return tensor.astype(dtype)

    claims_tied = architecture.tied_embeddings and "lm_head.weight" in files
    if claims_tied and not np.array_equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
        raise UserError(
            f"{setting} = {folder}: config.json says tie_word_embeddings = true, but lm_head.weight differs "
            "from the embeddings: set it to false"
        )
    leaves = {}
    for path, p in declare(architecture).items():
        if p.stacked:
            leaves[path] = np.stack([read(p.name.format(layer=i)) for i in range(architecture.num_layers)])
        else:
            leaves[path] = read(p.name)
        leaves[path] = leaves[path].reshape(p.shape)
    if critic:
        leaves |= {("value_head", key): read(name, np.float32)[0] for name, key in VALUE_HEAD.items()}
    return build_tree(leaves)


def _tensor_files(folder: Path, setting: str) -> dict[str, Path]:
    """The file of each tensor."""
    files: dict[str, Path] = {}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = sorted(folder.glob("*.bin"))
        hint = f"; {pickled[0].name} is a pickle, which is not read: convert it" if pickled else ""
        raise UserError(f"{setting} = {folder}: no *.safetensors in it{hint}")
    for path in paths:
        try:
            with safe_open(path, "np") as file:
                files |= dict.fromkeys(file.keys(), path)
        except SafetensorError as error:
            raise UserError(f"{path}: not a complete safetensors file ({error})") from None
    return files


def save_folder(
    folder: Path,
    architecture: Architecture,
    params: Params,
    source: Path,
    dtype: Any = "bfloat16",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes what transformers and vLLM load: weights in `dtype`, config, tokenizer and chat template.

    `source` is the folder that the model came from: its config.json and tokenizer go along. A critic
    (parameters with a value head) becomes a token classifier with one label, its head `score`; critic.path reads it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = to_hf(architecture, params)
    config = json.loads((source / "config.json").read_text())
    task = "ForCausalLM"
    if "value_head" in params:
        task = "ForTokenClassification"
        head = params["value_head"]
        score = [(name, head[key][None]) for name, key in VALUE_HEAD.items()]
        tensors = [(name, x) for name, x in tensors if name != "lm_head.weight"] + score
        config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config.pop("torch_dtype", None)
    config |= {
        "architectures": [ARCHITECTURES[architecture.model_type] + task],
        "dtype": str(np.dtype(dtype)),
        "tie_word_embeddings": architecture.tied_embeddings,
    }
    _write_shards(folder, iter(tensors), np.dtype(dtype), shard_bytes)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for pattern in CARRIED_FILES if folder.resolve() != source.resolve() else ():
        for path in source.glob(pattern):
            shutil.copy(path, folder / path.name)


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Any]], dtype: np.dtype, shard_bytes: int) -> None:
    """One model.safetensors, or numbered shards with their index where there is more than `shard_bytes`."""
    shards: list[dict[str, np.ndarray]] = [{}]
    size, total = 0, 0
    for name, x in tensors:
        tensor = np.asarray(jax.device_get(x)).astype(dtype)
        if size and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
