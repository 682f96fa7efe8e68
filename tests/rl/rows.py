"""Packed rows with holes, garbage outside the mask, and the same sequences laid out in other ways."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rows:
    """[B, T] each; `arrays` are random inside the mask and NaN or 1e6 outside."""

    mask: np.ndarray
    segment_ids: np.ndarray
    arrays: dict[str, np.ndarray]


def spoil(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """x inside the mask; NaN and 1e6 in turn outside."""
    garbage = np.where(np.arange(x.size).reshape(x.shape) % 2 == 0, np.nan, 1e6)
    return np.where(mask, x, garbage)


def make(seed: int, *names: str, dtype: type = np.float32) -> Rows:
    """3 rows of 12: three sequences, one of them with holes; one that fills its row; one without masked-in tokens."""
    ids = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 0], [1] * 12, [1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0, 0]], np.int32)
    mask = np.array(
        [[0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0] + [0] * 6],
        bool,
    )
    rng = np.random.default_rng(seed)
    arrays = {name: spoil(rng.normal(size=ids.shape), mask).astype(dtype) for name in names}
    return Rows(mask, ids, arrays)


def unpack(rows: Rows, width: int) -> tuple[Rows, list[tuple[int, int, int, int]]]:
    """One sequence per row of `width`, and for each (row, first, last + 1) of the packed form with its new row."""
    pieces = []
    for b, ids in enumerate(rows.segment_ids):
        for segment in range(1, ids.max() + 1):
            (where,) = np.nonzero(ids == segment)
            pieces.append((b, where[0], where[-1] + 1))

    def lay(x: np.ndarray, fill: float) -> np.ndarray:
        out = np.full((len(pieces), width), fill, x.dtype)
        for row, (b, start, stop) in enumerate(pieces):
            out[row, : stop - start] = x[b, start:stop]
        return out

    arrays = {name: lay(x, np.nan) for name, x in rows.arrays.items()}
    ids = (lay(rows.segment_ids, 0) != 0).astype(np.int32)
    return Rows(lay(rows.mask, False), ids, arrays), [(b, a, z, r) for r, (b, a, z) in enumerate(pieces)]


def repack(x: np.ndarray, places: list[tuple[int, int, int, int]], like: np.ndarray) -> np.ndarray:
    """The inverse of `unpack` for a result that is 0 at padding."""
    out = np.zeros(like.shape, x.dtype)
    for b, start, stop, row in places:
        out[b, start:stop] = x[row, : stop - start]
    return out
