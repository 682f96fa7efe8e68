"""What a person should know before the first step, beside what the config comes down to."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxppo.config import Config


def controller_notes(config: Config) -> list[str]:
    """A line where a run is too short for its adaptive controller to matter."""
    control, steps = config.algorithm.kl_ctrl, config.trainer.total_training_steps or 0
    sequences = steps * config.sequences_per_step
    if not config.algorithm.use_kl_in_reward or control.type == "fixed" or sequences >= control.horizon:
        return []
    most = (1 + 0.2 * config.sequences_per_step / control.horizon) ** steps
    return [
        f"algorithm.kl_ctrl.horizon = {control.horizon} sequences, but the whole run has {sequences}: the adaptive "
        f"coefficient can grow by a factor of at most {most:.3f}; a smaller horizon moves it faster"
    ]


def resume_notes(checkpoint: Path, old: Mapping[str, Any], config: Config) -> list[str]:
    """Where a run goes on, and whether its learning rates follow another curve than before; `old` is its config."""
    notes = [
        f"resuming from {checkpoint} (a new run: trainer.resume = never, with another trainer.output_dir)",
    ]
    before, now = old["trainer"]["total_training_steps"], config.trainer.total_training_steps
    cosine = [name for name, x in (("actor", config.actor), ("critic", config.critic)) if x.lr_scheduler == "cosine"]
    if cosine and before != now:
        notes.append(
            f"trainer.total_training_steps: {before} in the checkpoint, {now} now: the cosine of "
            f"{' and '.join(f'{name}.lr' for name in cosine)} is another curve from here on"
        )
    return notes
