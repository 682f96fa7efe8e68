"""Exactly one BOS where the tokenizer uses one, whoever writes it; the ids of the engine are the ids of the trainer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import jaxppo
from jaxppo.config import UserError
from jaxppo.data.chat import decode, eos_ids, load_tokenizer, render

VOCABULARY = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *"abcdefgh"])}
QUICKSTART = Path(jaxppo.__file__).parent / "assets" / "quickstart"
PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def make(template: str | None, adds_bos: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = template
    return fast


MESSAGES = [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("template", "adds_bos", "ids"),
    [
        (PLAIN, True, [1, 4, 5]),
        ("<s>" + PLAIN, True, [1, 4, 5]),
        ("<s>" + PLAIN, False, [1, 4, 5]),
        ("<s><s>" + PLAIN, True, [1, 4, 5]),
        (PLAIN, False, [4, 5]),
    ],
)
def test_one_bos_or_none(template, adds_bos, ids):
    tokenizer = make(template, adds_bos)
    assert render(tokenizer, MESSAGES) == ids
    assert render(tokenizer, "ab") == ids


def test_without_a_template_a_string_is_text_and_messages_are_refused():
    assert render(make(None, True), "ab") == [1, 4, 5]
    with pytest.raises(UserError, match="no chat template"):
        render(make(None, True), MESSAGES)


def test_the_generation_prompt_is_added():
    template = PLAIN + "{% if add_generation_prompt %}h{% endif %}"
    assert render(make(template, False), MESSAGES) == [4, 5, 11]


def test_every_eos_that_the_folder_names(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert eos_ids(tmp_path, make(PLAIN, False)) == (2, 7, 9)
    tokenizer = make(PLAIN, False)
    tokenizer.eos_token = None
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no eos_token_id"):
        eos_ids(tmp_path, tokenizer)


def test_a_damaged_generation_config_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{broken")
    with pytest.raises(UserError, match=r"generation_config.json: not JSON"):
        eos_ids(tmp_path, make(PLAIN, False))


def test_special_tokens_do_not_reach_the_reward():
    assert decode(make(PLAIN, False), [4, 5, 2, 0]) == "ab"


def test_the_shipped_tokenizer():
    tokenizer = load_tokenizer(str(Path(jaxppo.__file__).parent / "assets" / "quickstart"))
    ids = render(tokenizer, [{"role": "user", "content": "27+58="}])
    assert decode(tokenizer, ids) == "27+58="
    assert len(ids) == 6


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match="its tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_damaged_tokenizer_is_one_line(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "added_tokens": [], "model": {"type": "absent"}}')
    with pytest.raises(UserError, match="its tokenizer cannot be loaded") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_nothing_is_said_of_a_missing_pytorch():
    """In a process of its own, where it cannot be found."""
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)\n"
        f"from jaxppo.data.chat import load_tokenizer; load_tokenizer({str(QUICKSTART)!r})\n"
        "from transformers.utils import is_torch_available; assert not is_torch_available()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == done.stdout == ""


HOSTILE = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch PROOF') }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ messages.append(1) }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include '/etc/passwd' %}",
    "{{ 1 / 0 }}",
    "{{ messages[0]['content'] + 1 }}",
    "{{ x",
]


@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_or_broken_template_is_refused_in_one_line(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="chat template refuses the prompt") as caught:
        render(make(template, False), MESSAGES)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_template_does_not_see_the_environment(monkeypatch):
    monkeypatch.setenv("JAXPPO_TEST_SECRET", "gefahr")
    tokenizer = make("{{ lipsum.__globals__ }}{{ environ }}{{ os }}" + PLAIN, False)
    assert render(tokenizer, MESSAGES) == [4, 5]


def test_half_a_surrogate_pair_is_named():
    with pytest.raises(UserError, match=r"no valid Unicode: '\\ud800' at character 1 is half of a surrogate pair"):
        render(make(PLAIN, False), "a\ud800")


def test_characters_that_the_tokenizer_does_not_know():
    tokenizer = make(PLAIN, False)
    assert render(tokenizer, "a😀") == [4, tokenizer.unk_token_id]
    without_unk = Tokenizer(models.WordLevel({"a": 0, "<s>": 1}))
    without_unk.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    with pytest.raises(UserError, match=r"the tokenizer cannot encode the prompt \(.*Missing \[UNK\] token"):
        render(PreTrainedTokenizerFast(tokenizer_object=without_unk), "ab")


def test_a_tokenizer_that_is_code_runs_only_where_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.path", [*sys.path])
    make(PLAIN, False).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\nclass Mine(PreTrainedTokenizerFast):\n    pass\n"
    )
    with pytest.raises(UserError, match="its tokenizer is Python code .* only model.trust_remote_code = true would"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()
    assert render(load_tokenizer(str(tmp_path), trust_remote_code=True), "ab")
    assert (tmp_path / "ran").exists()
