"""Rows of parquet or JSONL files -> prompts as token ids, with what the reward needs to know of each."""

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from jaxppo.config import DataConfig, UserError
from jaxppo.data.chat import render
from jaxppo.data.gsm8k import gsm8k_row

Row = dict[str, Any]


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
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int,
    setting: str = "data.train_files",
) -> PromptSet:
    """Reads, renders and fits all rows (the first `max_samples`, unless -1) to data.max_prompt_length.

    Raises UserError naming the file, the row and the setting to change.
    """
    prompts: list[Prompt] = []
    dropped = truncated = 0
    rows = ((file, number, row) for file in files for number, row in enumerate(read_rows(file, setting)))
    for index, (file, number, row) in enumerate(rows):
        if index == max_samples:
            break
        where = f"{setting}: {file}, row {number}"
        prompt = _prompt_of(row, config.prompt_key, where)
        ids = render(tokenizer, prompt)
        if not ids:
            raise UserError(f"{where}: the prompt has no tokens")
        if len(ids) > config.max_prompt_length:
            if config.filter_overlong_prompts:
                dropped += 1
                continue
            ids = truncate(ids, config, where)
            truncated += 1
        text = prompt if isinstance(prompt, str) else "\n".join(str(m["content"]) for m in prompt)
        reward_model = row.get("reward_model") or {}
        source = row.get("data_source") or "unknown"
        extra = row.get("extra_info") or {}
        prompts.append(Prompt(index, tuple(ids), text, source, reward_model.get("ground_truth"), extra))
    if not prompts:
        raise UserError(
            f"{setting} = {', '.join(files)}: no prompt is left ({dropped} longer than data.max_prompt_length = "
            f"{config.max_prompt_length} were dropped)"
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


def read_rows(file: str, setting: str) -> Iterator[Row]:
    """Rows of a .parquet or .jsonl file; raw GSM8K rows (question, answer) get verl's columns."""
    path = Path(file)
    if not path.is_file():
        others = sorted(str(p) for p in path.parent.glob("*")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(file, others, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"{setting}: {file}: no such file{hint}")
    if path.suffix == ".parquet":
        rows = _read_parquet(path, setting)
    elif path.suffix == ".jsonl":
        rows = _read_jsonl(path, setting)
    else:
        raise UserError(f"{setting}: {file}: valid are .parquet and .jsonl files")
    for number, row in enumerate(rows):
        yield gsm8k_row(row, path.stem, number) if {"question", "answer"} <= row.keys() and "prompt" not in row else row


def _read_parquet(path: Path, setting: str) -> Iterator[Row]:
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{setting}: {path}: not a parquet file ({str(error).splitlines()[0]})") from None
    yield from table.to_pylist()


def _read_jsonl(path: Path, setting: str) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{setting}: {path}, line {number + 1}: not JSON ({error.msg})") from None
            if not isinstance(row, dict):
                raise UserError(f"{setting}: {path}, line {number + 1}: not a JSON object")
            yield row


def _prompt_of(row: Row, key: str, where: str) -> Any:
    if key not in row:
        columns = ", ".join(sorted(row))
        raise UserError(f"{where}: no column data.prompt_key = {key!r}; the columns are {columns}")
    prompt = row[key]
    if not prompt:
        raise UserError(f"{where}: the prompt is empty")
    if isinstance(prompt, str):
        return prompt
    if not (isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)):
        raise UserError(f"{where}: the prompt is neither a string nor a list of messages with role and content")
    return prompt


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.tokens, prompt.data_source, prompt.ground_truth], default=str).encode())
    return digest.hexdigest()
