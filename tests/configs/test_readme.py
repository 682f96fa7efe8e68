"""What the README tells people to type works."""

import json
import re
import shlex
from pathlib import Path

import pytest

import jaxppo
from jaxppo.checks import check
from jaxppo.cli import load_config
from jaxppo.config import DataConfig
from jaxppo.data.chat import load_tokenizer
from jaxppo.data.prompts import load_prompts

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = re.findall(r"python -m jaxppo\.train (.*?)\s*(?:#.*)?$", "".join(text for _, text in BLOCKS), re.MULTILINE)


def test_there_are_commands():
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_accepted(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(load_config(shlex.split(command)))


def test_the_row_is_a_prompt_of_the_quickstart(tmp_path):
    (row,) = (text for kind, text in BLOCKS if kind == "json")
    (tmp_path / "sums.jsonl").write_text(row)
    tokenizer = load_tokenizer(str(Path(jaxppo.__file__).parent / "assets" / "quickstart"))
    (prompt,) = load_prompts((str(tmp_path / "sums.jsonl"),), DataConfig(max_prompt_length=6), tokenizer, -1).prompts
    assert (prompt.text, prompt.data_source, prompt.ground_truth) == ("27+58=", "sums", "85")
    assert json.loads(row)["prompt"] == prompt.text
