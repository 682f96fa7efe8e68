"""Mathematical answers, compared by value with math-verify: LaTeX, fractions, sets, intervals, expressions."""

import logging
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it prints a whole response where its time is up


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1.0 where the response's final answer (boxed, or its last expression) equals the ground truth, else 0.0.

    The ground truth is LaTeX or a number. Each parse and comparison has math-verify's own 5 seconds, after which it
    counts as no answer and as unequal. Raises ValueError where the ground truth is missing or cannot be read.
    Example: "so $x = \\\\frac{2}{4}$" for "1/2" is 1.0.
    """
    truth = None if ground_truth is None else parse(f"\\boxed{{{ground_truth}}}")
    if not truth:
        raise ValueError(f"reward_model.ground_truth = {ground_truth!r} is no mathematical expression")
    return float(verify(truth, parse(solution_str)))
