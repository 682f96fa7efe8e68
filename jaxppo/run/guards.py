"""What a person should hear of at once."""

from jaxppo.config import Config
from jaxppo.run.metrics import Metrics


def alarms(metrics: Metrics, config: Config) -> list[str]:
    """A line for everything that went wrong in a step without stopping it; none for a healthy step."""
    found = [mismatch_alarm(metrics, config.rollout.max_logp_diff)]
    for network in ("actor", "critic"):
        if skipped := metrics.get(f"{network}/skipped_updates"):  # there may be no critic
            found.append(f"ALARM: {skipped:.0f} optimizer steps of the {network} were skipped: gradient not finite")
    return [line for line in found if line is not None]


def mismatch_alarm(metrics: Metrics, limit: float) -> str | None:
    """What to say where the engine did not sample from what the trainer scores; None where all is well."""
    gap = metrics["training/rollout_logp_diff_mean"]
    if gap <= limit:  # and not for NaN
        return None
    return (
        f"ALARM: mean |log-prob(trainer) - log-prob(engine)| = {gap:.4f} nats is above rollout.max_logp_diff = "
        f"{limit}: the engine has other weights, or top_k or top_p cut its distribution"
    )
