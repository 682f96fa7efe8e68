"""One description of a decoder, read from a Hugging Face config.json.

Llama (SmolLM2 included) and Qwen2 (Qwen2.5 included) are the same network: RMS norms, rotary positions, grouped
query attention, SwiGLU. Qwen2 has biases on queries, keys and values. What differs from that is refused here.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from jaxppo.config import UserError, did_you_mean

RopeType = Literal["default", "linear", "llama3", "yarn"]
MODEL_TYPES = ("llama", "qwen2")
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ONLY_VALID: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}
"""Settings that change the network, with the one value that it supports."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: their base, and how they are stretched to contexts longer than those of pretraining."""

    type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 2048
    """Tokens of pretraining's context (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn: factor of cosine and sine; None is 0.1 ln(factor) + 1."""

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Rope":
        """Reads `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before it)."""
        given = _given(raw, "rope_parameters", _given(raw, "rope_scaling", {}))
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in get_args(RopeType):
            raise UserError(f"config.json: rope_type = {kind!r}: {_nearest(kind, get_args(RopeType))}")
        _refuse(given)
        rope = cls(type=kind, theta=given.get("rope_theta", _given(raw, "rope_theta", 10000.0)))
        if kind == "default":
            return rope
        needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
        if missing := [name for name in needed if given.get(name) is None]:
            raise UserError(f"config.json: rope_type = {kind!r} needs {', '.join(missing)}")
        names = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
        values = {name: given[name] for name in names if given.get(name) is not None}
        positions = _given(given, "original_max_position_embeddings", _given(raw, "max_position_embeddings", 2048))
        for name in ("mscale", "mscale_all_dim"):
            if given.get(name) is not None:
                raise UserError(f"config.json: rope_type = {kind!r} with {name} is not supported")
        if given.get("truncate", True) is not True:
            raise UserError("config.json: rope truncate = False is not supported, only True is valid")
        return dataclasses.replace(rope, original_max_positions=positions, **values)

    def stretched(self, max_positions: int | None) -> int | None:
        """The longest sequence of a config.json with this max_position_embeddings.

        linear and yarn multiply pretraining's context by their factor; llama3's configs state the product.
        Source: vLLM's derivation of max_model_len.
        """
        if self.type == "yarn":
            max_positions = self.original_max_positions
        if max_positions is None or self.type in ("default", "llama3"):
            return max_positions
        return int(max_positions * self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Everything about a network that is not a number to be learned."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied_embeddings: bool
    """The output matrix is the embedding matrix."""
    attention_bias: bool
    """On queries, keys and values."""
    rope: Rope
    max_positions: int | None
    """Tokens of the longest sequence, stretched rotary positions counted; None where config.json says nothing."""
    initializer_range: float
    """Standard deviation of random initial matrices."""
    eos_ids: tuple[int, ...]
    """Any of these ends a sequence; those of generation_config.json, if there is one, come last."""
    raw: dict[str, Any] = dataclasses.field(repr=False, compare=False)
    """The config.json as it was read: export writes it back."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Architecture":
        """Reads config.json, and EOS ids of generation_config.json. Raises UserError for what is not supported."""
        folder = Path(folder)
        architecture = cls.from_dict(_read_json(folder / "config.json"))
        if not (folder / "generation_config.json").exists():
            return architecture
        more = _ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
        return dataclasses.replace(architecture, eos_ids=tuple(dict.fromkeys(architecture.eos_ids + more)))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Architecture":
        """From the contents of a config.json. Raises UserError for what is missing or not supported."""
        _check(raw)
        heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
        kv_heads, head_dim = _given(raw, "num_key_value_heads", heads), _given(raw, "head_dim", hidden // heads)
        if raw.get("head_dim") is None and hidden % heads:
            raise UserError(f"config.json: num_attention_heads = {heads} must divide hidden_size = {hidden}")
        if heads % kv_heads:
            raise UserError(f"config.json: num_key_value_heads = {kv_heads} must divide num_attention_heads = {heads}")
        if head_dim % 2:
            raise UserError(f"config.json: head_dim = {head_dim} must be even: rotary positions turn pairs")
        rope = Rope.from_dict(raw)
        return cls(
            model_type=raw["model_type"],
            vocab_size=raw["vocab_size"],
            hidden_size=hidden,
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_given(raw, "rms_norm_eps", 1e-6),
            tied_embeddings=_given(raw, "tie_word_embeddings", False),
            attention_bias=raw["model_type"] == "qwen2",
            rope=rope,
            max_positions=rope.stretched(raw.get("max_position_embeddings")),
            initializer_range=_given(raw, "initializer_range", 0.02),
            eos_ids=_ids(raw.get("eos_token_id")),
            raw=dict(raw),
        )

    def to_dict(self) -> dict[str, Any]:
        """The contents of the config.json."""
        return {**self.raw, "tie_word_embeddings": self.tied_embeddings}


def _check(raw: dict[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UserError(f"config.json: model_type = {model_type!r}: {_nearest(model_type, MODEL_TYPES)}")
    if missing := [name for name in REQUIRED if raw.get(name) is None]:
        raise UserError(f"config.json: {', '.join(missing)} missing")
    _refuse(raw)
    if model_type == "llama" and raw.get("attention_bias"):
        raise UserError("config.json: attention_bias = True of a llama is not supported, only False is valid")
    if other := sorted(set(_given(raw, "layer_types", ())) - {"full_attention"}):
        raise UserError(f"config.json: layer_types holds {other[0]!r}, only 'full_attention' is valid")


def _refuse(raw: dict[str, Any]) -> None:
    for name, valid in ONLY_VALID.items():
        if raw.get(name, valid) not in (valid, None):
            raise UserError(f"config.json: {name} = {raw[name]!r} is not supported, only {valid!r} is valid")


def _nearest(given: object, valid: Sequence[str]) -> str:
    """Example: "valid are llama, qwen2 (did you mean qwen2?)"."""
    return f"valid are {', '.join(valid)}" + did_you_mean(str(given), valid, cutoff=0.4)


def _given(raw: dict[str, Any], name: str, default: Any) -> Any:
    """The default stands for null too: transformers writes it for what it derives."""
    value = raw.get(name)
    return default if value is None else value


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: a Hugging Face model folder has one") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
