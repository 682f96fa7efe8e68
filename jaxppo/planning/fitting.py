"""What does not fit, and the setting whose smaller or larger value would make it fit, by proportion."""

import math
from collections.abc import Iterator

from jaxppo.planning.plan import Plan


def advice(plan: Plan) -> Iterator[str]:
    """One line for each phase that needs more than there is; else one that says how much is left."""
    over = {phase: size for phase, size in plan.memory.peaks.items() if size > plan.capacity}
    if not over:
        left = plan.capacity - max(plan.memory.peaks.values())
        yield f"fits: {left / 1e9:.1f} GB of each device stay free"
    for phase, size in over.items():
        yield f"{phase} needs {(size - plan.capacity) / 1e9:.1f} GB more than there is: {_change(plan, phase)}"


def _change(plan: Plan, phase: str) -> str:
    """The first of these that suffices by proportion: engine's share, tokens, axes."""
    memory, rollout, room = plan.memory, plan.config.rollout, plan.capacity
    others = memory.peaks[phase] - memory.rollout
    if rollout.engine == "vllm" and (phase == "rollout" or memory.rollout_stays):
        total = room / 0.95
        if others < 0.95 * room and (room - others) / total >= 0.1:
            return f"set rollout.gpu_memory_utilization to {math.floor(100 * (room - others) / total) / 100}"
        if phase != "rollout":
            return f"set rollout.sleep_level to 1, which gives vLLM's {memory.rollout / 1e9:.0f} GB back"
    if phase == "rollout":
        return _more(plan, "tensor", memory.peaks[phase], room)
    tokens, row = plan.config.actor.max_tokens_per_device, plan.config.row_length
    fixed = memory.state + (memory.gradients if phase == "update" else 0) + memory.batch
    growing = memory.peaks[phase] - fixed - (memory.rollout if memory.rollout_stays else 0)
    used = min(tokens, plan.rows_per_device * row)
    fitting = int((room - (memory.peaks[phase] - growing)) / growing * used) // row * row if growing > 0 else 0
    if fitting >= row:
        return f"set actor.max_tokens_per_device to {fitting} (now {used} are used)"
    return _more(plan, "fsdp", memory.peaks[phase], room)


def _more(plan: Plan, axis: str, size: float, room: float) -> str:
    factor = 2 ** math.ceil(math.log2(size / room))
    return f"set mesh.{axis} to {plan.sizes[axis] * factor}, on {factor} times the devices"
