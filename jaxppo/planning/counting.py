"""FLOPs and collectives of one device, counted on a step's jaxpr.

Inside shard_map shapes are one device's own, and collectives name their mesh axes; loops multiply. What XLA's
partitioner adds outside shard_map is left out: the optimizer is elementwise on parts, and its norm is one number.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

ATTENTION = ("kernel_forward", "kernel_backward")
"""Functions of planning.attention: their products are the kernel's, which skips what is masked."""
COLLECTIVES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
}
Collective = tuple[str, tuple[str, ...]]
"""Kind and mesh axes. Example: ("all-gather", ("fsdp",))."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trips:
    """How often loops turn whose number is data: expected ones, which may be fractions."""

    optimizer_steps: float
    """Of one network, in one PPO step."""
    microbatches: float
    """Of one minibatch."""
    chunks: float
    """Of the loop over the vocabulary's logits."""
    attention: float
    """The share of a row's T x T scores that the kernel computes: one sequence of l tokens has l²/2."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """Of one device."""

    flops: float
    """Of matrix products, attention included: 2 each multiplication."""
    sent: Counter[Collective]
    """Bytes that the device sends, in a ring."""


def count(jaxpr: Any, sizes: dict[str, int], trips: Trips) -> Counts:
    """Counts of a closed jaxpr on a mesh of these axis sizes."""
    counter = _Counter(sizes, trips)
    counter.walk(jaxpr.jaxpr, 1.0, inside=math.prod(sizes.values()) == 1)
    return Counts(counter.flops, counter.sent)


class _Counter:
    def __init__(self, sizes: dict[str, int], trips: Trips) -> None:
        self.sizes, self.trips = sizes, trips
        self.flops: float = 0.0
        self.sent: Counter[Collective] = Counter()

    def walk(self, jaxpr: Any, times: float, inside: bool) -> None:
        """`times` is how often it runs; `inside` a shard_map shapes are one device's."""
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name == "dot_general":
                split = 1 if inside else math.prod(self.sizes.values())
                self.flops += times * product_flops(eqn) / split
            elif name in COLLECTIVES:
                self._collective(eqn, times)
            elif name == "scan":
                self.walk(eqn.params["jaxpr"].jaxpr, times * eqn.params["length"], inside)
            elif name == "while":
                body = eqn.params["body_jaxpr"].jaxpr
                self.walk(body, times * self._turns(body), inside)
            elif name == "cond":
                self.walk(eqn.params["branches"][-1].jaxpr, times, inside)
            else:
                share = self.trips.attention if eqn.params.get("name") in ATTENTION else 1.0
                for inner in _inner(eqn):
                    self.walk(inner, times * share, inside or name == "shard_map")

    def _turns(self, body: Any) -> float:
        """Of a while loop, known by what is in it: chunks of logits hold no scan over layers, microbatches hold one,
        and optimizer steps hold the loop over microbatches."""
        if not _holds(body, "scan"):
            return self.trips.chunks
        loops = [e.params["body_jaxpr"].jaxpr for e in _all(body) if e.primitive.name == "while"]
        return self.trips.optimizer_steps if any(_holds(b, "scan") for b in loops) else self.trips.microbatches

    def _collective(self, eqn: Any, times: float) -> None:
        kind = COLLECTIVES[eqn.primitive.name]
        names = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
        names = tuple(n for n in ((names,) if isinstance(names, str) else names) if self.sizes[n] > 1)
        n = math.prod(self.sizes[name] for name in names)
        if n == 1:
            return
        given = sum(_nbytes(v) for v in eqn.invars)
        share = {
            "all-gather": n - 1,
            "reduce-scatter": (n - 1) / n,
            "all-to-all": (n - 1) / n,
            "all-reduce": 2 * (n - 1) / n,
            "permute": 1,
        }[kind]
        self.sent[kind, names] += times * share * given  # type: ignore[assignment]


def product_flops(eqn: Any) -> float:
    """2 x batch x rows x columns x contracted of a dot_general."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return 2.0 * math.prod(out) * math.prod(left[d] for d in contracted)


def _inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs in an equation's parameters, of its forward rule alone where it has one of its own."""
    for value in eqn.params.values():
        if hasattr(value, "eqns"):
            yield value
        elif hasattr(value, "jaxpr") and hasattr(value.jaxpr, "eqns"):
            yield value.jaxpr


def _all(jaxpr: Any) -> Iterator[Any]:
    """Every equation, at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple) else (value,):
                if hasattr(item, "eqns"):
                    yield from _all(item)
                elif hasattr(item, "jaxpr") and hasattr(item.jaxpr, "eqns"):
                    yield from _all(item.jaxpr)


def _holds(jaxpr: Any, primitive: str) -> bool:
    return any(eqn.primitive.name == primitive for eqn in _all(jaxpr))


def _nbytes(variable: Any) -> int:
    return variable.aval.size * variable.aval.dtype.itemsize
