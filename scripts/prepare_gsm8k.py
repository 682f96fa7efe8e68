"""Writes GSM8K as verl-format parquet.

usage: python scripts/prepare_gsm8k.py [--source DIR] [--out data/gsm8k]

DIR holds train.jsonl and test.jsonl as OpenAI's grade-school-math repository has them; without it the data set
openai/gsm8k is downloaded from the Hugging Face hub.
"""

import dataclasses
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import tyro

from jaxppo.config import UserError
from jaxppo.data.files import read_rows
from jaxppo.data.gsm8k import gsm8k_row

SPLITS = ("train", "test")


@dataclasses.dataclass(frozen=True)
class Options:
    source: Path | None = None
    """Folder with train.jsonl and test.jsonl; None downloads openai/gsm8k."""
    out: Path = Path("data/gsm8k")
    """Folder for train.parquet and test.parquet."""


def main(options: Options) -> None:
    for split in SPLITS:
        file = download(split) if options.source is None else options.source / f"{split}.jsonl"
        raw = enumerate(read_rows(str(file), "--source"))
        rows = [gsm8k_row(row, split, index, f"{file}, row {index}") for index, row in raw]
        options.out.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), options.out / f"{split}.parquet")
        print(f"{options.out / split}.parquet: {len(rows)} rows")


def download(split: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name = f"main/{split}-00000-of-00001.parquet"
    try:
        return Path(hf_hub_download("openai/gsm8k", name, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"openai/gsm8k cannot be had from the hub ({reason}); --source names a local folder") from None


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
