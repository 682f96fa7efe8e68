"""Rows of parquet or JSONL files -> prompts as token ids, with what the reward needs to know of each."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxppo.config import DataConfig, UserError
from jaxppo.data.chat import render
from jaxppo.data.files import Row, read_rows
from jaxppo.data.gsm8k import gsm8k_row, is_raw_gsm8k

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt. Example: tokens (5, 11, 3), text "27+58=", data_source "arithmetic", ground_truth "85"."""

    index: int
    """Of the row, over all files."""
    tokens: tuple[int, ...]
    """The very ids that the engine gets and the trainer scores."""
    text: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """The prompts of some files."""

    prompts: list[Prompt]
    dropped: int
    """Overlong ones that were filtered out."""
    truncated: int
    fingerprint: str
    """Changes with any token id or ground truth, and with their order."""


def load_prompts(
    files: tuple[str, ...],
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_samples: int,
    setting: str = "data.train_files",
    *,
    needs_truth: bool = False,
) -> PromptSet:
    """Reads, renders and fits all rows (the first `max_samples`, unless -1) to data.max_prompt_length.

    Raw rows of GSM8K count as verl's. Raises UserError naming the file, the row (from 0) and the setting to change;
    with `needs_truth` also where a row has no reward_model.ground_truth.
    """
    prompts: list[Prompt] = []
    seen = dropped = truncated = 0
    rows = ((file, number, row) for file in files for number, row in enumerate(read_rows(file, setting)))
    for index, (file, number, row) in enumerate(rows):
        if index == max_samples:
            break
        seen += 1
        where = f"{setting}: {file}, row {number}"
        if is_raw_gsm8k(row, config.prompt_key):
            row = gsm8k_row(row, Path(file).stem, number, where)
            prompt = row["prompt"]
        else:
            prompt = _prompt_of(row, config.prompt_key, where)
        try:
            ids = render(tokenizer, prompt)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        if not ids:
            raise UserError(f"{where}: the prompt has no tokens")
        if len(ids) > config.max_prompt_length:
            if config.filter_overlong_prompts:
                dropped += 1
                continue
            ids = truncate(ids, config, where)
            truncated += 1
        text = prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)
        source = _optional(row, "data_source", "unknown", where)
        truth = _optional(row, "reward_model", {}, where).get("ground_truth")
        if needs_truth and truth is None:
            raise UserError(f"{where}: no reward_model.ground_truth, which reward.function needs")
        extra = _optional(row, "extra_info", {}, where)
        prompts.append(Prompt(index, tuple(ids), text, source, truth, extra))
    if not prompts:
        raise UserError(
            f"{setting} = {', '.join(files)}: no prompt is left ({dropped} longer than data.max_prompt_length = "
            f"{config.max_prompt_length} were dropped, of {seen} rows)"
        )
    return PromptSet(prompts, dropped, truncated, _fingerprint(prompts))


def truncate(ids: list[int], config: DataConfig, where: str) -> list[int]:
    """At most data.max_prompt_length ids: `left` cuts the start away, `right` the end, `middle` what is between."""
    limit = config.max_prompt_length
    match config.truncation:
        case "left":
            return ids[-limit:]
        case "right":
            return ids[:limit]
        case "middle":
            return ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :]
        case "error":
            raise UserError(
                f"{where}: the prompt has {len(ids)} tokens, data.max_prompt_length = {limit}: raise it, set "
                "data.filter_overlong_prompts, or data.truncation to left, right or middle"
            )


def _prompt_of(row: Row, key: str, where: str) -> Any:
    if key not in row:
        columns = ", ".join(sorted(row))
        raise UserError(f"{where}: no column data.prompt_key = {key!r}; the columns are {columns}")
    prompt = row[key]
    if not prompt:
        raise UserError(f"{where}: the prompt is empty")
    if isinstance(prompt, str):
        return prompt
    if not (isinstance(prompt, list) and all(_is_message(m) for m in prompt)):
        raise UserError(f"{where}: the prompt is neither a string nor a list of messages with role and content")
    return prompt


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and "role" in message and isinstance(message.get("content"), str)


def _optional(row: Row, column: str, default: Any, where: str) -> Any:
    """The row's value, which has the default's type; the default where the column is missing or null."""
    value = row.get(column)
    if value is None:
        return default
    if not isinstance(value, type(default)):
        raise UserError(f"{where}: {column} is a {type(value).__name__}, valid is a {type(default).__name__}")
    return value


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.tokens, prompt.data_source, prompt.ground_truth], default=str).encode())
    return digest.hexdigest()
