"""GSM8K: is the number after the last #### the right one?"""

import re
import unicodedata
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

Mode = Literal["robust", "verl", "verl_flexible"]

VERL_WINDOW = 300
"""verl reads only the last characters of a response."""
LINE = 200
"""Characters after #### in which an answer must end."""
NUMBER = re.compile(r"(?<![\w.,])-?\$?-?(\d[\d,]*(?:\.\d+)?|\.\d+)(?!\.?\d|\w)")


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
        #### 3 + 4 = 7                        7       0      1               1 (after the last =)
        #### . or nothing or no string        1       0      0               0
    """
    if not isinstance(response, str):
        return 0.0
    match mode:
        case "verl":
            found = re.findall(r"#### (\-?[0-9\.\,]+)", response[-VERL_WINDOW:])
            return float(bool(found) and found[-1].replace(",", "").replace("$", "") == ground_truth)
        case "verl_flexible":
            found = [x for x in re.findall(r"(\-?[0-9\.\,]+)", response[-VERL_WINDOW:]) if x not in ("", ".")]
            return float(bool(found) and found[-1] == ground_truth)
        case "robust":
            answer, truth = marked_number(response), parse_number(str(ground_truth))
            return float(answer is not None and answer == truth)


def marked_number(response: str) -> Decimal | None:
    """The number in the line after the last ####; after the line's last = where it has one."""
    _, marker, tail = response.rpartition("####")
    if not marker:
        return None
    line = unicodedata.normalize("NFKC", tail[:LINE].strip().partition("\n")[0])
    return parse_number(line.rpartition("=")[2])


def parse_number(text: str) -> Decimal | None:
    """The first number of a text, thousands' commas left out; None where there is none or it goes on past LINE."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("\\$", "$")
    found = NUMBER.search(text[:LINE])
    if found is None or found.end() == LINE:
        return None
    try:
        return Decimal(found.group().replace("$", "").replace(",", ""))
    except InvalidOperation:
        return None


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, mode: Mode
) -> float:
    """`score` with verl's signature."""
    return score(solution_str, ground_truth, mode)
