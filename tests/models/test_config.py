import json

import pytest

from jaxppo.config import UserError
from jaxppo.models.config import Architecture, Rope
from tests.tiny import HF_CONFIG

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("change", "rope"),
    [
        ({}, Rope()),
        ({"rope_theta": 1e6}, Rope(theta=1e6)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rope(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}},
         Rope(type="linear", factor=2.0, original_max_positions=128)),
        ({"rope_scaling": LLAMA3}, Rope(type="llama3", factor=8.0, original_max_positions=16)),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
         Rope(type="llama3", theta=5e5, factor=8.0, original_max_positions=16)),
    ],
)  # fmt: skip
def test_old_and_new_rope_settings_are_read(change, rope):
    assert Architecture.from_dict(HF_CONFIG | change).rope == rope


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen"}, r"model_type = 'qwen': valid are llama, qwen2 \(did you mean qwen2\?\)"),
        ({"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, r"rope_type = 'yarm': .* \(did you mean yarn\?\)"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type = 'linear' needs factor"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported, only False is valid"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types holds 'sliding_attention'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 must divide num_attention_heads = 4"),
        ({"vocab_size": None}, "vocab_size missing"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message):
    with pytest.raises(UserError, match=message):
        Architecture.from_dict(HF_CONFIG | change)


def test_eos_ids_of_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    assert Architecture.from_folder(tmp_path).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert Architecture.from_folder(tmp_path).eos_ids == (2, 7)


def test_a_folder_without_a_config_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"config.json does not exist"):
        Architecture.from_folder(tmp_path)


def test_head_dim_is_read_or_derived():
    assert Architecture.from_dict(HF_CONFIG).head_dim == 8
    assert Architecture.from_dict(HF_CONFIG | {"head_dim": 16}).head_dim == 16


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({}, 128),
        ({"max_position_embeddings": None}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 320),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 128),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 512),
        ({"rope_scaling": LLAMA3}, 128),
    ],
)
def test_the_longest_sequence_counts_stretched_positions(change, limit):
    assert Architecture.from_dict(HF_CONFIG | change).max_positions == limit
