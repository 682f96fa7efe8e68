"""Guards over each step's metrics: what a person should hear of at once, and what the loop does about it."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Literal

from jaxppo.config import Config
from jaxppo.run.metrics import Metrics

SEVERITY = ("log", "skip", "rollback", "stop")
KL, SCORE, ENTROPY, EXPLAINED = (
    "actor/reward_kl_penalty", "critic/score/mean", "actor/entropy", "critic/vf_explained_var"
)  # fmt: skip
MISMATCH = "training/rollout_logp_diff_mean"
NORMS = ("actor/grad_norm", "critic/grad_norm")
ROLLBACKS = "guards/rollbacks"
LOSSES = ("actor/pg_loss", "critic/vf_loss")


@dataclasses.dataclass(frozen=True)
class Alarm:
    """A guard that has tripped."""

    guard: str
    action: Literal["log", "skip", "rollback", "stop"]
    text: str

    @property
    def line(self) -> str:
        """For a person."""
        return f"{'advice' if self.guard == 'kl_min' else 'ALARM'}: {self.text}"


class Guards:
    """The guards of a run. What they remember is the run's own lines of metrics, so a resume changes nothing.

    A guard that speaks of a state, not of an event (kl, reward, entropy, explained_variance), logs it when it begins
    and is silent until it has ended. Windows start anew after a roll-back.
    """

    def __init__(self, config: Config, lines: Iterable[Mapping[str, float | None]] = ()) -> None:
        """`lines` are those of the steps before."""
        self._config = config
        self._history: dict[str, list[float]] = {}
        self._tripped: set[str] = set()
        self._best_score, rollbacks = -math.inf, 0.0
        for line in lines:
            if line["step"]:
                known = {name: x for name, x in line.items() if x is not None}
                self(known)
                if known.get(ROLLBACKS, 0.0) > rollbacks:
                    self.restart()
                rollbacks = known.get(ROLLBACKS, 0.0)

    def restart(self) -> None:
        """After a roll-back, which the bad steps must not trip again."""
        self._history.clear()
        self._tripped.clear()

    def __call__(self, metrics: Metrics) -> list[Alarm]:
        """The alarms of one step; none for a healthy one."""
        found = [*self._nonfinite(metrics), *self._mismatch(metrics), *self._grad_norm(metrics)]
        for name in (KL, SCORE, ENTROPY, EXPLAINED, *NORMS, *LOSSES):
            if math.isfinite(metrics.get(name, math.nan)):
                self._history.setdefault(name, []).append(metrics[name])
                del self._history[name][: -self._config.guards.window]
        states = [*self._kl(metrics), *self._collapses(), *self._plateau()]
        lasting = {alarm.guard for alarm in states}
        found += [alarm for alarm in states if alarm.guard not in self._tripped or alarm.action != "log"]
        self._tripped = lasting
        return found

    def _window(self, name: str) -> float | None:
        """A metric's mean over the last `window` steps, once there are as many."""
        values = self._history.get(name, [])
        return statistics.fmean(values) if len(values) == self._config.guards.window else None

    def _nonfinite(self, metrics: Metrics) -> Iterable[Alarm]:
        guards = self._config.guards
        for network in ("actor", "critic"):
            if skipped := metrics.get(f"{network}/skipped_updates"):  # there may be no critic
                limit = f" or its norm above {guards.grad_norm_max:g}" if guards.grad_norm == "skip" else ""
                text = f"{skipped:.0f} optimizer steps of the {network} were skipped: gradient not finite{limit}"
                yield Alarm("nonfinite", guards.nonfinite, text)

    def _mismatch(self, metrics: Metrics) -> Iterable[Alarm]:
        """The engine did not sample from what the trainer scores."""
        gap, limit = metrics.get(MISMATCH, math.nan), self._config.rollout.max_logp_diff
        if not gap <= limit:  # for NaN too
            yield Alarm(
                "mismatch",
                self._config.guards.mismatch,
                f"mean |log-prob(trainer) - log-prob(engine)| = {gap:.4f} nats is above rollout.max_logp_diff = "
                f"{limit}: the engine has other weights, or top_k or top_p cut its distribution",
            )

    def _grad_norm(self, metrics: Metrics) -> Iterable[Alarm]:
        guards = self._config.guards
        if guards.grad_norm is None or guards.grad_norm == "skip":  # that one is inside the update
            return
        for name in NORMS:
            norm, before = metrics.get(name), self._history.get(name, [])
            limits = {} if guards.grad_norm_max is None else {"guards.grad_norm_max": guards.grad_norm_max}
            if len(before) == guards.window:
                limits["guards.grad_norm_spike x the window's median"] = guards.grad_norm_spike * statistics.median(
                    before
                )
            for limit, value in limits.items():
                if norm is not None and norm > value:
                    yield Alarm("grad_norm", guards.grad_norm, f"{name} = {norm:.4g} is above {limit} = {value:.4g}")

    def _kl(self, metrics: Metrics) -> Iterable[Alarm]:
        guards, control = self._config.guards, self._config.algorithm.kl_ctrl
        if guards.kl is None or KL not in metrics:
            return
        if not self._config.algorithm.use_kl_in_reward:
            more, less = "a larger actor.kl_loss_coef or a smaller actor.lr", "a smaller actor.kl_loss_coef"
        elif control.type == "adaptive":
            more = less = "the adaptive controller moves its coefficient"
        else:
            more, less = "a larger algorithm.kl_ctrl.kl_coef or a smaller actor.lr", "a smaller kl_coef"
        kl, mean = metrics[KL], self._window(KL)
        if kl > guards.kl_max:
            text = f"KL to the reference = {kl:.4f} nats is above guards.kl_max = {guards.kl_max}: {more}"
            yield Alarm("kl", guards.kl, text)
        elif mean is not None and mean < guards.kl_min:
            text = f"KL to the reference = {mean:.4f} nats over {guards.window} steps is below guards.kl_min = "
            yield Alarm("kl_min", "log", f"{text}{guards.kl_min}: {less} or a larger actor.lr would let it learn more")

    def _collapses(self) -> Iterable[Alarm]:
        guards = self._config.guards
        over = f"over {guards.window} steps"
        if (score := self._window(SCORE)) is not None and guards.reward is not None:
            self._best_score = max(self._best_score, score)
            if self._best_score > 0 and score < (1 - guards.reward_drop) * self._best_score:
                text = f"mean score = {score:.4f} {over}, of the best window's {self._best_score:.4f}: the reward "
                yield Alarm("reward", guards.reward, f"{text}has collapsed (guards.reward_drop = {guards.reward_drop})")
        entropy, explained = self._window(ENTROPY), self._window(EXPLAINED)
        if guards.entropy is not None and entropy is not None and entropy < guards.entropy_min:
            text = f"entropy = {entropy:.4f} nats {over} is below guards.entropy_min = {guards.entropy_min}: "
            yield Alarm("entropy", guards.entropy, f"{text}the policy no longer explores (actor.entropy_coeff)")
        if guards.explained_variance is None or explained is None:
            return
        if explained < guards.explained_variance_min:
            limit = f"guards.explained_variance_min = {guards.explained_variance_min}"
            text = f"explained variance = {explained:.4f} {over} is below {limit}: the critic misleads the policy"
            yield Alarm("explained_variance", guards.explained_variance, f"{text} (critic.lr, trainer.critic_warmup)")

    def _plateau(self) -> Iterable[Alarm]:
        guards = self._config.guards
        windows = [self._history[name] for name in LOSSES if name in self._history]
        if guards.plateau is None or not windows or any(len(w) < guards.window for w in windows):
            return
        if all(max(w) - min(w) < guards.plateau_change for w in windows):
            text = f"policy and value loss changed less than guards.plateau_change = {guards.plateau_change:g} over"
            yield Alarm("plateau", guards.plateau, f"{text} {guards.window} steps: nothing more is learnt")


def gravest(alarms: Iterable[Alarm]) -> Alarm | None:
    """The one whose action goes furthest, the first of equals; None without any."""
    return max(alarms, key=lambda alarm: SEVERITY.index(alarm.action), default=None)
