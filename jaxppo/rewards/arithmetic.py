"""Sums: the quickstart's reward."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1.0 where the response is the number and nothing else. Example: "85" for ground truth "85"."""
    if ground_truth is None:
        raise ValueError("the row has no reward_model.ground_truth")
    return float(solution_str.strip() == str(ground_truth))
