"""From chat messages to token ids, once; and from response ids to text."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from jaxppo.config import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[dict[str, Any]]
TEMPLATE_ERRORS = (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError)
"""What goes wrong in a template. It runs in jinja's immutable sandbox, whose refusals are TemplateErrors."""


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of a Hugging Face folder. One that brings code of its own is refused unless that is trusted."""
    file = Path(path) / "tokenizer_config.json"
    if file.is_file() and not trust_remote_code and "auto_map" in _read_json(file):
        raise UserError(
            f"model.path = {path}: its tokenizer is Python code in that folder (auto_map in tokenizer_config.json), "
            "which only model.trust_remote_code = true would run"
        )
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no PyTorch: none is needed
    from transformers import AutoTokenizer  # here, since it takes seconds

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises nothing more specific for a damaged file
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"model.path = {path}: its tokenizer cannot be loaded ({reason})") from None


def render(tokenizer: "PreTrainedTokenizerBase", prompt: Prompt) -> list[int]:
    """Token ids of a prompt, with the template's opening of the answer.

    A string is a single user message where the tokenizer has a chat template, else plain text. The ids start with
    exactly one BOS where the tokenizer uses one, whether the template writes it or not.
    """
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise UserError("the tokenizer has no chat template, but a prompt is a list of messages: use plain strings")
        text = prompt
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TEMPLATE_ERRORS as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"the tokenizer's chat template refuses the prompt ({reason})") from None
    ids = _encode(tokenizer, text)
    bos: Any = tokenizer.bos_token_id
    if bos is None or (ids[:1] != [bos] and tokenizer.encode("", add_special_tokens=True)[:1] != [bos]):
        return ids
    first = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    return [bos, *ids[first:]]


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    try:
        text.encode()
        return tokenizer.encode(text, add_special_tokens=False)
    except UnicodeEncodeError as error:
        lone = f"{text[error.start]!r} at character {error.start} is half of a surrogate pair"
        raise UserError(f"the prompt is no valid Unicode: {lone}") from None
    except Exception as error:  # the tokenizers library raises nothing more specific
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"the tokenizer cannot encode the prompt ({reason})") from None


def eos_ids(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """All ids that end a response: the tokenizer's and those of generation_config.json and config.json."""
    own: Any = tokenizer.eos_token_id
    found: set[int] = set() if own is None else {own}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        given: Any = _read_json(path).get("eos_token_id") if path.is_file() else None
        found |= set(given) if isinstance(given, list) else set() if given is None else {given}
    if not found:
        raise UserError(
            f"model.path = {folder}: no eos_token_id in its tokenizer, generation_config.json or config.json"
        )
    return tuple(sorted(found))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"model.path: {path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"model.path: {path}: not a JSON object")
    return content


def decode(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> str:
    """The text of a response without special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))
