"""Sizes and checksums of a checkpoint's files, written when it is complete: what is damaged later is noticed."""

import json
import os
import zlib
from pathlib import Path

NAME = "manifest.json"
CHUNK = 1 << 24


def write_manifest(directory: Path) -> None:
    """Size and CRC-32 of every file below, all of them fsynced, and last the manifest itself."""
    # Orbax still adds the time to its own file, which a resume does not read
    files = [p for p in sorted(directory.rglob("*")) if p.is_file() and p.name not in (NAME, "_CHECKPOINT_METADATA")]
    entries = {str(path.relative_to(directory)): [path.stat().st_size, _checksum(path, sync=True)] for path in files}
    temporary = directory / f"{NAME}.tmp"
    with temporary.open("w") as file:
        json.dump(entries, file, indent=0)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / NAME)
    for folder in (directory, directory.parent):
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def find_fault(directory: Path) -> str | None:
    """What is not as the manifest says; None for a whole checkpoint, or one without a manifest."""
    try:
        entries = json.loads((directory / NAME).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return f"{NAME} is not readable"
    for name, (size, checksum) in entries.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _checksum(path) != checksum:
            return f"the checksum of {name} differs"
    return None


def _checksum(path: Path, *, sync: bool = False) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            value = zlib.crc32(chunk, value)
        if sync:
            os.fsync(file.fileno())
    return value
