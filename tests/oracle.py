"""PPO's formulas once more, in float64 NumPy and plain loops over sequences: what the package is compared with.

Arrays are [B, T]. A sequence is the list of its masked-in indices (row, t); everything is worked out on such lists,
so that neither packing nor padding can play a part.
"""

from collections.abc import Callable

import numpy as np

Index = tuple[int, int]


def sequences(mask: np.ndarray, segment_ids: np.ndarray) -> list[list[Index]]:
    """The masked-in indices of every segment, in reading order; segments without any give an empty list."""
    found: dict[Index, list[Index]] = {}
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if segment_ids[b, t] != 0:
                tokens = found.setdefault((b, int(segment_ids[b, t])), [])
                if mask[b, t]:
                    tokens.append((b, t))
    return list(found.values())


def gradient(f: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of a scalar function; entries that are not finite (outside the mask) get 0."""
    result = np.zeros(x.shape)
    for i in np.ndindex(*x.shape):
        if np.isfinite(x[i]):
            up, down = x.astype(np.float64), x.astype(np.float64)
            up[i] += step
            down[i] -= step
            result[i] = (f(up) - f(down)) / (2 * step)
    return result


def whiten(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    tokens = [float(v) for v, m in zip(x.ravel(), mask.ravel(), strict=True) if m]
    if len(tokens) < 2:
        return np.where(mask, x, 0.0)
    mean = sum(tokens) / len(tokens)
    variance = sum((v - mean) ** 2 for v in tokens) / (len(tokens) - 1)
    return np.where(mask, (np.where(mask, x, 0.0) - mean) / np.sqrt(variance + 1e-8), 0.0)


def kl(logp: float, ref_logp: float, kind: str) -> float:
    r = logp - ref_logp
    if kind in ("kl", "k1"):
        return r
    if kind == "abs":
        return abs(r)
    if kind in ("mse", "k2"):
        return r * r / 2
    if kind in ("low_var_kl", "k3"):
        d = min(max(-r, -20.0), 20.0)
        return min(np.exp(d) - d - 1, 10.0)
    raise ValueError(kind)


def token_rewards(
    scores: np.ndarray, kl: np.ndarray, coef: float, mask: np.ndarray, segment_ids: np.ndarray
) -> np.ndarray:
    rewards = np.zeros(mask.shape)
    for tokens in sequences(mask, segment_ids):
        for i in tokens:
            rewards[i] = -coef * kl[i] + (scores[i] if i == tokens[-1] else 0.0)
    return rewards


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    segment_ids: np.ndarray,
    gamma: float,
    lam: float,
) -> tuple[np.ndarray, np.ndarray]:
    """By the definition: A_t is the sum over k of (γλ)^k δ_{t+k}, over the sequence's own tokens."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for tokens in sequences(mask, segment_ids):
        r = [float(rewards[i]) for i in tokens]
        v = [float(values[i]) for i in tokens] + [0.0]
        deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(r))]
        for k, i in enumerate(tokens):
            advantages[i] = sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(deltas)))
            returns[i] = advantages[i] + v[k]
    return advantages, returns


def rewards_to_go(rewards: np.ndarray, mask: np.ndarray, segment_ids: np.ndarray, gamma: float) -> np.ndarray:
    result = np.zeros(mask.shape)
    for tokens in sequences(mask, segment_ids):
        for k, i in enumerate(tokens):
            result[i] = sum(gamma**j * float(rewards[later]) for j, later in enumerate(tokens[k:]))
    return result


def outcome(scores: np.ndarray, group_ids: np.ndarray, estimator: str, lengths: np.ndarray) -> np.ndarray:
    """Advantages [N] of whole responses, group by group; ids below 0 are none."""
    result = np.zeros(len(scores))
    present = [i for i in range(len(scores)) if group_ids[i] >= 0]
    for group in {int(group_ids[i]) for i in present}:
        members = [i for i in present if group_ids[i] == group]
        r, n = [float(scores[i]) for i in members], len(members)
        mean = sum(r) / n if n > 1 else 0.0
        std = (sum((x - mean) ** 2 for x in r) / (n - 1)) ** 0.5 if n > 1 else 1.0
        for i, x in zip(members, r, strict=True):
            others = [y for j, y in zip(members, r, strict=True) if j != i]
            if estimator == "grpo":
                result[i] = (x - mean) / (std + 1e-6)
            elif estimator in ("dr_grpo", "reinforce_plus_plus_baseline"):
                result[i] = x - mean
            elif estimator == "rloo":
                result[i] = x - (sum(others) / len(others) if others else 0.0)
            elif estimator == "opo":
                total = sum(float(lengths[j]) for j in members)
                weighted = sum(float(lengths[j]) * float(scores[j]) for j in members)
                result[i] = x - (weighted / total if n > 1 and total else 0.0)
            elif estimator == "gpg":
                result[i] = (x - mean) * len(present) / max(1, sum(scores[j] != 0 for j in present))
            elif estimator == "grpo_passk":
                result[i] = (x - max(others)) / (std + 1e-6) if others and x > max(others) else 0.0
            else:
                raise ValueError(estimator)
    return result


def optimal_token_baseline(
    rewards: np.ndarray, energy: np.ndarray, mask: np.ndarray, segment_ids: np.ndarray, group_ids: np.ndarray
) -> np.ndarray:
    result, returns = np.zeros(mask.shape), rewards_to_go(rewards, mask, segment_ids, 1.0)
    groups: dict[int, list[list[Index]]] = {}
    for tokens in sequences(mask, segment_ids):
        if tokens:
            groups.setdefault(int(group_ids[tokens[0]]), []).append(tokens)
    for members in groups.values():
        for t in range(max(map(len, members))):
            here = [
                (tokens[t], sum(float(energy[i]) for i in tokens[: t + 1])) for tokens in members if len(tokens) > t
            ]
            total = sum(weight for _, weight in here) + 1e-8
            baseline = sum(returns[i] * weight for i, weight in here) / total if len(members) > 1 else 0.0
            for i, _ in here:
                result[i] = returns[i] - baseline
    return result


def policy_loss_token(logp: float, old_logp: float, advantage: float, low: float, high: float, c: float) -> float:
    ratio = np.exp(min(max(logp - old_logp, -20.0), 20.0))
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -advantage * c) if advantage < 0 else loss


def policy_loss_of_sequences(
    logp: np.ndarray,
    old: np.ndarray,
    advantages: np.ndarray,
    mask: np.ndarray,
    ids: np.ndarray,
    mode: str,
    *,
    low,
    high,
) -> np.ndarray:
    """One loss for each sequence that has tokens, at the first of them: gspo's and geo_mean's by their papers."""
    result = np.zeros(mask.shape)
    for tokens in sequences(mask, ids):
        if not tokens:
            continue
        r = [float(logp[i] - old[i]) for i in tokens]
        a = [float(advantages[i]) for i in tokens]
        if mode == "gspo":
            s = np.exp(min(sum(r) / len(r), 10.0))
            losses = [max(-x * s, -x * min(max(s, 1 - low), 1 + high)) for x in a]
            result[tokens[0]] = sum(losses) / len(losses)
        else:
            signs = [np.sign(x) for x in a]
            bounded = [sign * min(sign * x, sign * min(max(x, -low), high)) for sign, x in zip(signs, r, strict=True)]
            result[tokens[0]] = -sum(a) / len(a) * np.exp(sum(bounded) / len(bounded))
    return result


def value_loss_token(value: float, old_value: float, ret: float, clip: float) -> float:
    clipped = min(max(value, old_value - clip), old_value + clip)
    return 0.5 * max((value - ret) ** 2, (clipped - ret) ** 2)


def per_token(function: Callable[..., float], mask: np.ndarray, *arrays: np.ndarray) -> np.ndarray:
    """function of the arrays' entries at each masked-in token, 0 elsewhere."""
    result = np.zeros(mask.shape)
    for i in np.ndindex(*mask.shape):
        if mask[i]:
            result[i] = function(*(float(a[i]) for a in arrays))
    return result


def entropy(logits: np.ndarray) -> float:
    """Of one distribution [V]."""
    z = [float(v) for v in logits if v > -np.inf]
    total = sum(np.exp(v - max(z)) for v in z)
    p = [np.exp(v - max(z)) / total for v in z]
    return -sum(q * np.log(q) for q in p if q > 0)


def aggregate(loss: np.ndarray, mask: np.ndarray, segment_ids: np.ndarray, mode: str, norm_length: int) -> float:
    """The loss of a whole minibatch."""
    with_tokens = [tokens for tokens in sequences(mask, segment_ids) if tokens]
    sums = [sum(float(loss[i]) for i in tokens) for tokens in with_tokens]
    lengths = [len(tokens) for tokens in with_tokens]
    if mode == "token-mean":
        return sum(sums) / sum(lengths)
    if mode == "seq-mean-token-sum":
        return sum(sums) / len(sums)
    if mode == "seq-mean-token-mean":
        return sum(s / n for s, n in zip(sums, lengths, strict=True)) / len(sums)
    if mode == "seq-mean-token-sum-norm":
        return sum(s / norm_length for s in sums) / len(sums)
    raise ValueError(mode)


def importance_weights(
    train: np.ndarray, rollout: np.ndarray, mask: np.ndarray, segment_ids: np.ndarray, level: str, cap: float
) -> np.ndarray:
    result = np.zeros(mask.shape)
    for tokens in sequences(mask, segment_ids):
        ratios = [float(train[i] - rollout[i]) for i in tokens]
        for i, ratio in zip(tokens, ratios, strict=True):
            exponent = ratio if level == "token" else sum(ratios)
            result[i] = min(np.exp(min(max(exponent, -20.0), 20.0)), cap)
    return result


def accepted(
    train: np.ndarray,
    rollout: np.ndarray,
    mask: np.ndarray,
    segment_ids: np.ndarray,
    kind: str,
    lower: float,
    upper: float,
) -> np.ndarray:
    result = np.zeros(mask.shape, bool)
    level, estimator = kind.rsplit("_", 1)
    for tokens in sequences(mask, segment_ids):
        r = [float(train[i]) - float(rollout[i]) for i in tokens]
        x = [{"k1": -y, "k2": y * y / 2, "k3": np.exp(y) - 1 - y}[estimator] for y in r]
        if tokens and level != "token":
            whole = {"seq_sum": sum(x), "seq_mean": sum(x) / len(x), "seq_max": max(x)}[level]
            x = [whole] * len(x)
        for i, y in zip(tokens, x, strict=True):
            result[i] = np.log(lower) <= y <= np.log(upper) if estimator == "k1" else y <= upper
    return result
