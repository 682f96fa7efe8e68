"""Peak rates of GPUs as their makers state them, and the time that counted work takes at a share of them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from jaxppo.planning.counting import Collective

Device = Literal["a100", "h100", "h200", "b200"]
GPUS_PER_NODE = 8
"""That NVLink joins; collectives over more go through the network."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one GPU, per second, one direction."""

    flops: float
    """bfloat16, dense."""
    memory: float
    """Bytes of HBM."""
    memory_rate: float
    """HBM bytes."""
    nvlink: float
    """Bytes to GPUs of the same node."""
    network: float
    """Bytes to other nodes, of the GPU's own adapter: 200 Gbit/s for the a100, 400 for the others."""


RATES: dict[Device, Rates] = {
    "a100": Rates(flops=312e12, memory=80e9, memory_rate=2.0e12, nvlink=300e9, network=25e9),
    "h100": Rates(flops=989e12, memory=80e9, memory_rate=3.35e12, nvlink=450e9, network=50e9),
    "h200": Rates(flops=989e12, memory=141e9, memory_rate=4.8e12, nvlink=450e9, network=50e9),
    "b200": Rates(flops=2250e12, memory=180e9, memory_rate=8.0e12, nvlink=900e9, network=50e9),
}
FLOPS_EFFICIENCY = 0.45
LINK_EFFICIENCY = 0.75
MEMORY_EFFICIENCY = 0.8
"""Shares of the peaks that large products, collectives and copies reach."""


def crosses_nodes(axes: tuple[str, ...], sizes: Mapping[str, int]) -> bool:
    """Whether a group of devices over these mesh axes spans nodes. The mesh's last axis changes fastest."""
    order = list(sizes)
    first = min(order.index(axis) for axis in axes)
    return math.prod(sizes[axis] for axis in order[first:]) > GPUS_PER_NODE


def collective_seconds(sent: Mapping[Collective, float], sizes: Mapping[str, int], rates: Rates) -> float:
    """One after the other, nothing hidden behind computation."""
    seconds = 0.0
    for (_, axes), nbytes in sent.items():
        link = rates.network if crosses_nodes(axes, sizes) else rates.nvlink
        seconds += nbytes / (link * LINK_EFFICIENCY)
    return seconds


def compute_seconds(flops: float, rates: Rates) -> float:
    return flops / (rates.flops * FLOPS_EFFICIENCY)


def memory_seconds(nbytes: float, rates: Rates) -> float:
    return nbytes / (rates.memory_rate * MEMORY_EFFICIENCY)
