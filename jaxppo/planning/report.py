"""A plan in words: tables for the terminal, and what to change where it does not fit."""

from collections.abc import Iterator, Mapping

from jaxppo.planning import rates
from jaxppo.planning.fitting import advice
from jaxppo.planning.plan import Plan

GB = 1e9


def lines(plan: Plan) -> Iterator[str]:
    """The whole report."""
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.sizes.items())
    devices = 1
    for size in plan.sizes.values():
        devices *= size
    yield f"{plan.config.model.path}: {plan.parameters / 1e9:.2f} B parameters on {devices} {plan.device}: {axes}"
    yield (
        f"assumed: each of {plan.config.sequences_per_step} sequences has {plan.length} of at most "
        f"{plan.config.max_sequence_length} tokens; microbatches of {plan.rows} rows of {plan.config.row_length} "
        f"({plan.tokens:,} tokens in {plan.padded_tokens:,} places that are computed)"
    )
    yield ""
    yield from _memory(plan)
    yield ""
    yield from _work(plan)
    yield ""
    yield from advice(plan)


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    yield "bytes of one device"
    for name, size in memory.parameters.items():
        yield _row(f"parameters, {name}", size)
    yield _row("optimizer state", memory.optimizer)
    yield _row("gradients", memory.gradients)
    yield _row("batch", memory.batch)
    yield _row("activations and temporaries, update", max(0, memory.update_temporaries - memory.gradients))
    yield _row("activations and temporaries, score", memory.score_temporaries)
    yield _row("(XLA's count of the update's arguments)", memory.update_arguments)
    yield _row(f"rollout, {plan.config.rollout.engine}", memory.rollout)
    for phase, size in memory.peaks.items():
        yield _row(f"peak, {phase}", size) + f"  of {plan.capacity / GB:.1f}" + " DOES NOT FIT" * (size > plan.capacity)


def _row(name: str, size: float) -> str:
    return f"  {name:40s} {size / GB:10.3f} GB"


def _work(plan: Plan) -> Iterator[str]:
    device = rates.RATES[plan.device]
    yield "work of one device in a PPO step      score       update"
    yield _pair("model TFLOPs", plan.model_flops, 1e12)
    yield _pair("compiled TFLOPs", plan.flops, 1e12)
    kinds = sorted({key for sent in plan.sent.values() for key in sent})
    for kind, axes in kinds:
        link = "network" if rates.crosses_nodes(axes, plan.sizes) else "NVLink"
        sent = {phase: counter[kind, axes] for phase, counter in plan.sent.items()}
        yield _pair(f"{kind} over {' x '.join(axes)}, GB", sent, GB) + f"  ({link})"
    yield ""
    compute = {p: rates.compute_seconds(f, device) for p, f in plan.flops.items()}
    collective = {p: rates.collective_seconds(s, plan.sizes, device) for p, s in plan.sent.items()}
    optimizer = rates.memory_seconds(plan.optimizer_traffic, device)
    yield _pair("products, s", compute, 1)
    yield _pair("collectives, s", collective, 1)
    yield _pair("optimizer, s", {"score": 0.0, "update": optimizer}, 1)
    hidden = sum(max(compute[p], collective[p]) for p in compute) + optimizer
    alone = sum(compute[p] + collective[p] for p in compute) + optimizer
    yield f"predicted: {hidden:.1f} s with collectives hidden behind products, {alone:.1f} s one after the other"
    yield f"  rates: {_rates(device)}"
    yield (
        f"  at shares of {rates.FLOPS_EFFICIENCY} of the FLOP/s, {rates.LINK_EFFICIENCY} of the links and "
        f"{rates.MEMORY_EFFICIENCY} of the HBM; rollouts and rewards are not in it"
    )


def _rates(r: rates.Rates) -> str:
    return (
        f"{r.flops / 1e12:.0f} TFLOP/s bf16, {r.memory / GB:.0f} GB of HBM at {r.memory_rate / 1e12:.2f} TB/s, "
        f"NVLink {r.nvlink / GB:.0f} GB/s, network {r.network / GB:.0f} GB/s"
    )


def _pair(name: str, figures: Mapping[str, float], unit: float) -> str:
    return f"  {name:34s} {figures['score'] / unit:8.3f}  {figures['update'] / unit:11.3f}"
