"""Sums: the quickstart's reward."""

from typing import Any

from jaxppo.rewards.gsm8k import truth_text


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1.0 where the response is the number and nothing else. Example: "85" for ground truth "85"."""
    return float(solution_str.strip() == truth_text(ground_truth))
