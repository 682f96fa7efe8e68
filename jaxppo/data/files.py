"""Rows of parquet and JSONL files as dictionaries, whatever their columns."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxppo.config import UserError, did_you_mean

Row = dict[str, Any]


def read_rows(file: str, setting: str) -> Iterator[Row]:
    """Rows of a .parquet or .jsonl file. Raises UserError naming the setting, the file and what is wrong with it."""
    path = Path(file)
    if not path.is_file():
        others = sorted(str(p) for p in path.parent.glob("*") if p.is_file()) if path.parent.is_dir() else []
        raise UserError(f"{setting}: {file}: no such file{did_you_mean(file, others)}")
    if path.suffix == ".parquet":
        return _read_parquet(path, setting)
    if path.suffix == ".jsonl":
        return _read_jsonl(path, setting)
    raise UserError(f"{setting}: {file}: valid are .parquet and .jsonl files")


def _read_parquet(path: Path, setting: str) -> Iterator[Row]:
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{setting}: {path}: not a parquet file ({str(error).splitlines()[0]})") from None
    yield from table.to_pylist()


def _read_jsonl(path: Path, setting: str) -> Iterator[Row]:
    with path.open("rb") as lines:  # as bytes, so that text which is not UTF-8 is told with its line
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{setting}: {path}, line {number + 1}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise UserError(f"{setting}: {path}, line {number + 1}: not a JSON object")
            yield row
