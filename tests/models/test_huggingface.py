"""Folders in and out: bit-equal round trips, the same names, and folders that are refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxppo.config import UserError
from jaxppo.models import load
from jaxppo.models.config import Architecture
from jaxppo.models.heads import init_value_head
from jaxppo.models.huggingface import load_params, save_folder
from tests.models.test_transformers_parity import FAMILIES, GOLDENS


@pytest.fixture
def copy(tmp_path):
    def make(name):
        return shutil.copytree(GOLDENS / name, tmp_path / name)

    return make


def edit(folder, change):
    tensors = dict(load_file(folder / "model.safetensors"))
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shard_bytes", [4 << 30, 4000])
def test_a_round_trip_is_bit_equal_with_the_same_names(name, shard_bytes, tmp_path):
    model, out = load(GOLDENS / name), tmp_path / "out"
    save_folder(out, model.config, model.params, GOLDENS / name, "bfloat16", shard_bytes)
    want = load_file(GOLDENS / name / "model.safetensors")
    got = {key: x for file in out.glob("*.safetensors") for key, x in load_file(file).items()}
    assert got.keys() == want.keys()
    for key, x in want.items():
        np.testing.assert_array_equal(got[key], x, err_msg=key)
    if shard_bytes == 4000:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == want.keys()
        assert set(index["weight_map"].values()) == {file.name for file in out.glob("*.safetensors")}
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == json.loads((GOLDENS / name / "config.json").read_text())["architectures"]
    assert config["dtype"] == "bfloat16"
    assert (out / "generation_config.json").exists()
    jax.tree.map(np.testing.assert_array_equal, load(out).params, model.params)


def test_a_tied_folder_with_another_head_is_refused(copy):
    folder = copy("qwen2_tied")
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    load(folder)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"][::-1].copy()}))
    with pytest.raises(UserError, match=r"tie_word_embeddings = true, but lm_head.weight differs"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 tensors are missing, the first is model\.norm\.weight"),
        (lambda t: t.update({"model.extra": t["model.norm.weight"].copy()}), r"1 unexpected .* model\.extra"),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:3].copy()}),
            r"model\.norm\.weight is \(3,\)",
        ),
    ],
)
def test_tensors_that_do_not_match_are_named(copy, change, message):
    folder = copy("llama_yarn")
    edit(folder, change)
    with pytest.raises(UserError, match=message):
        load(folder)


def test_pickles_are_not_read(copy):
    folder = copy("llama_yarn")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle, which is not read: convert it"):
        load(folder)


def test_neither_a_folder_nor_on_the_hub():
    with pytest.raises(UserError, match=r"model\.path = no/such-model: not a folder"):
        load("no/such-model")


def test_a_critic_is_exported_as_a_token_classifier(tmp_path):
    model = load(GOLDENS / "llama_yarn")
    head = init_value_head(model.config)
    save_folder(tmp_path, model.config, {**model.params, "value_head": head}, GOLDENS / "llama_yarn", "float32")
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["score.weight"].shape == (1, 24)
    assert tensors["score.bias"].shape == (1,)
    assert "lm_head.weight" not in tensors
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForTokenClassification"]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_critic_is_read_back_with_its_value_head(name, tmp_path):
    """All of it bit for bit but an output matrix of its own, which a critic does not use."""
    model = load(GOLDENS / name)
    kernel = jnp.linspace(-1, 1, model.config.hidden_size, dtype=jnp.float32)
    critic = {**model.params, "value_head": {"kernel": kernel, "bias": jnp.float32(0.3)}}
    save_folder(tmp_path, model.config, critic, GOLDENS / name, "float32")
    got = load_params(tmp_path, Architecture.from_folder(tmp_path), np.float32, critic=True)
    if "head" in critic:
        critic["head"] = np.zeros_like(critic["head"])
    jax.tree.map(np.testing.assert_array_equal, got, critic)


def test_a_critic_of_a_language_model_starts_from_0_and_one_of_two_labels_is_refused(copy):
    folder = copy("llama_yarn")
    architecture = Architecture.from_folder(folder)
    got = load_params(folder, architecture, jnp.bfloat16, critic=True)
    assert got["value_head"]["kernel"].dtype == np.float32
    assert not got["value_head"]["kernel"].any()
    assert got["head"].any()
    edit(folder, lambda t: t.update({"score.weight": np.ones((2, 24), np.float32)}))
    with pytest.raises(UserError, match=r"critic\.path = .*: score\.weight is \(2, 24\), it must be \(1, 24\)"):
        load_params(folder, architecture, np.float32, critic=True)
    with pytest.raises(UserError, match=r"model\.path = .*: 1 unexpected tensors, the first is score\.weight"):
        load_params(folder, architecture, np.float32)


def test_float32_is_exported_as_it_is(tmp_path):
    model = load(GOLDENS / "llama_yarn")
    params = jax.tree.map(lambda x: x + jnp.float32(1e-6), model.params)
    save_folder(tmp_path, model.config, params, GOLDENS / "llama_yarn", "float32")
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path).params, params)
