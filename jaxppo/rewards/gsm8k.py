"""GSM8K: is the number after the last #### the right one?"""

import re
from decimal import Decimal
from typing import Any, Literal

Mode = Literal["robust", "verl", "verl_flexible"]

VERL_WINDOW = 300
"""verl reads only the last characters of a response."""
DRESS = r"(?:\*\*|[$€£¥]|\\[a-z]{1,9}\{){0,4}"
"""Between a sign and its digits; bounded, or a long run of $ would take quadratic time."""
NUMBER = re.compile(rf"(?<![\w.,])(?:(-){DRESS}|{DRESS}(-?))(\d[\d,]*(?:\.\d+)?|\.\d+)(?![.,]?\d|\w)")
GOES_ON = re.compile(r"\s*(?:(?:[-+*/^:×÷⁄·x]|\\times|\\cdot|\\div)\s*)?\d|\}\s*\{")
"""After a number: it is part of an expression, a range or a fraction, and no answer by itself."""
ASCII = {0xFF01 + i: 0x21 + i for i in range(94)} | dict.fromkeys((0x2212, 0x2013), ord("-"))
"""Full-width forms, the minus sign and the en dash; superscripts and vulgar fractions stay, since ² is no digit 2."""


def score(response: Any, ground_truth: Any, mode: Mode = "robust") -> float:
    """1.0 for the right answer, else 0.0; never an error, in time linear in the response.

    `verl` is verl's strict extraction to the letter, and `verl_flexible` its flexible one (the last run of digits,
    dots and commas, wherever it stands). `robust` reads what a person would: the number in the last line marked by
    ####, whatever bold, box, currency, percent or unit is around it, compared by value.

        response                              truth   verl   verl_flexible   robust
        #### 1,234                            1234    1      0               1
        #### $18                              18      0      1               1
        #### 18. or #### 18.00                18      0      0               1
        #### -5                               -5      1      1               1
        #### 5                                -5      0      0               0
        ####18, #### **18**, #### \\boxed{18}  18      0      1               1
        #### 5 ... #### 7                     7       1      1               1
        #### 42 and 400 further characters    42      0      0               1
        The total is 72 clips, altogether     72      0      0 (",")         0 (no ####)
        1-5=-4 #### 4                         -4      0      0               0

        further rows                          truth   verl   verl_flexible   robust
        #### 50%                              50      1      1               1
        #### 1.2.3                            1       0      0               0
        #### 1e400                            1       1      0               0
        #### １８ (full-width digits)          18      0      0               1
        #### -$18, -**18**, -\\boxed{18}       -18     0      0               1
        #### --5                              -5      0      1               1
        #### 3 + 4 = 7                        7       0      1               1 (after the last =)
        #### 3 + 4, 3/4, 3-4, 3 x 4, 3–4      3       1      0               0 (not evaluated)
        #### 18 ####                          18      1      1               1 (a closing mark)
        #### . or nothing or no string        1       0      0               0
    """
    if not isinstance(response, str):
        return 0.0
    match mode:
        case "verl":
            found = re.findall(r"#### (\-?[0-9\.\,]+)", response[-VERL_WINDOW:])
            return float(bool(found) and found[-1].replace(",", "").replace("$", "") == ground_truth)
        case "verl_flexible":
            found = re.findall(r"(\-?[0-9\.\,]+)", response[-VERL_WINDOW:])
            return float(bool(found) and next((x for x in reversed(found) if x != "."), found[0]) == ground_truth)
        case "robust":
            answer, truth = marked_number(response), parse_number(str(ground_truth))
            return float(answer is not None and answer == truth)


def marked_number(response: str) -> Decimal | None:
    """The number in the line after the last #### that has text behind it; after the line's last = where it has one."""
    _, marker, tail = response.rstrip("# \t\r\n").rpartition("####")
    if not marker:
        return None
    return parse_number(tail.strip().partition("\n")[0].rpartition("=")[2])


def parse_number(text: str) -> Decimal | None:
    """The first number of a text, thousands' commas left out; None where there is none or an expression goes on."""
    text = text.translate(ASCII).replace("\\$", "$").replace("{,}", ",")
    found = NUMBER.search(text)
    if found is None or GOES_ON.match(text, found.end()):
        return None
    before, after, digits = found.groups(default="")
    return Decimal(before + after + digits.replace(",", ""))


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, mode: Mode
) -> float:
    """`score` with verl's signature. Raises ValueError where the ground truth makes every response wrong."""
    truth = truth_text(ground_truth)
    if mode == "robust" and parse_number(truth) is None:
        raise ValueError(f"reward_model.ground_truth = {ground_truth!r} is no number")
    return score(solution_str, truth, mode)


def truth_text(ground_truth: Any) -> str:
    """18 and 18.0, as typed columns hold them, are "18". Raises ValueError where there is none."""
    if ground_truth is None:
        raise ValueError("the row has no reward_model.ground_truth")
    if isinstance(ground_truth, float) and ground_truth.is_integer():
        return str(int(ground_truth))
    return str(ground_truth)
