import re
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxppo.rewards.gsm8k import score

MODES = ("verl", "verl_flexible", "robust")

TABLE = [
    # response, truth, verl, verl_flexible, robust
    ("#### 1,234", "1234", 1, 0, 1),
    ("#### $18", "18", 0, 1, 1),
    ("#### 18.", "18", 0, 0, 1),
    ("#### 18.00", "18", 0, 0, 1),
    ("#### -5", "-5", 1, 1, 1),
    ("#### 5", "-5", 0, 0, 0),
    ("####18", "18", 0, 1, 1),
    ("#### **18**", "18", 0, 1, 1),
    ("#### \\boxed{18}", "18", 0, 1, 1),
    ("#### 5 ... #### 7", "7", 1, 1, 1),
    ("#### 42" + " and prose" * 40, "42", 0, 0, 1),
    ("The total is 72 clips, altogether", "72", 0, 0, 0),
    ("The total is 72 clips", "72", 0, 1, 0),
    ("1-5=-4 #### 4", "-4", 0, 0, 0),
    ("#### 50%", "50", 1, 1, 1),
    ("#### 1.2.3", "1", 0, 0, 0),
    ("#### 1e400", "1", 1, 0, 0),
    ("#### １８", "18", 0, 0, 1),
    ("#### 3 + 4 = 7", "7", 0, 1, 1),
    ("#### 18 dollars", "18", 1, 1, 1),
    ("#### -$18", "-18", 0, 0, 1),
    ("#### -\\boxed{18}", "-18", 0, 0, 1),
    ("#### -\\boxed{18}", "18", 0, 1, 0),
    ("#### \\boxed{-18}", "-18", 0, 1, 1),
    ("#### -**18**", "-18", 0, 0, 1),
    ("#### -€18", "18", 0, 1, 0),
    ("#### –18", "18", 0, 1, 0),
    ("#### --5", "-5", 0, 1, 1),
    ("#### -$-5", "-5", 0, 1, 1),
    ("#### 3–4", "3", 1, 0, 0),
    ("#### 3 x 4", "3", 1, 0, 0),
    ("#### 3 \\times 4", "3", 1, 0, 0),
    ("#### 3 + 4", "3", 1, 0, 0),
    ("#### 3/4", "3", 1, 0, 0),
    ("#### 3-4", "4", 0, 0, 0),
    ("#### \\frac{1}{2}", "1", 0, 0, 0),
    ("#### 12²", "122", 0, 0, 0),
    ("#### ½", "1", 0, 0, 0),
    ("#### 1,234abc", "1", 0, 0, 0),
    ("#### 1{,}234", "1234", 0, 0, 1),
    ("#### 18 ####", "18", 1, 1, 1),
    ("#### 18\n\n#", "18", 1, 1, 1),
    ("####\n18", "18", 0, 1, 1),
    ("####" + " " * 400 + "18", "18", 0, 1, 1),
    ("#### 18\nnot 19", "18", 1, 0, 1),
    ("#### .", "1", 0, 0, 0),
    ("#### .", ".", 1, 1, 0),
    ("", "1", 0, 0, 0),
]


@pytest.mark.parametrize(("response", "truth", "verl", "flexible", "robust"), TABLE)
def test_the_docstrings_table(response, truth, verl, flexible, robust):
    assert [score(response, truth, mode) for mode in MODES] == [verl, flexible, robust]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "response",
    [
        None,
        18,
        "#### " + "9" * 100_000,
        "#" * 100_000,
        "#### " + "-$" * 50_000,
        "#### -" + "$" * 100_000 + "8x",
        "#### " + "-" * 100_000 + "8",
        "#### " + "\\a{" * 50_000,
        "#### " + "1," * 50_000,
        "#### " + "9" * 50_000 + "." + "9" * 50_000 + "x",
    ],
)
def test_no_input_breaks_it(mode, response):
    assert score(response, "9", mode) == 0.0


def verl_oracle(text: str, truth: str, method: str) -> float:
    """verl's extraction, step by step: the last 300 characters, then the last match that counts."""
    text = text if len(text) <= 300 else text[len(text) - 300 :]
    if method == "strict":
        answers = [m.group(1) for m in re.finditer(r"#### (-?[\d.,]+)", text, re.ASCII)]
        answer = answers[-1].replace(",", "") if answers else None
    else:
        answer = None
        for m in re.finditer(r"-?[\d.,]+", text, re.ASCII):
            if answer is None or m.group() != "." or answer == ".":
                answer = m.group()
    return 1.0 if answer == truth else 0.0


TEXTS = st.lists(
    st.sampled_from(["#### ", "####", "-", ".", ",", "$", "7", "18", "x", " ", "\n", "=", "**", "１", "²", "=" * 290]),
    max_size=12,
).map("".join)
TRUTHS = st.sampled_from(["18", "7", "-7", "718", ".", ",", "7.18", "", "1"])


@settings(derandomize=True, deadline=None, max_examples=400)
@given(TEXTS, TRUTHS)
def test_the_verl_modes_are_verls(text, truth):
    assert score(text, truth, "verl") == verl_oracle(text, truth, "strict")
    assert score(text, truth, "verl_flexible") == verl_oracle(text, truth, "flexible")


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.decimals(-(10**7), 10**7, allow_nan=False, places=2), st.sampled_from(["{}", "**{}**", "${}", "\\boxed{{{}}}."])
)
def test_robust_reads_every_number_by_value(number, form):
    for written in (f"{number:f}", f"{number:,f}"):
        assert score(f"so #### {form.format(written)}", str(number)) == 1.0
        assert score(f"so #### {form.format(written)}", str(number + Decimal("0.01"))) == 0.0


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.text(), TEXTS, st.text())
def test_no_text_breaks_it(before, marked, after):
    for mode in MODES:
        assert score(before + marked + after, "18", mode) in (0.0, 1.0)
        assert score(marked, after, mode) in (0.0, 1.0)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.text("-–$€.,1x*{}\\=/ ", max_size=8))
def test_no_mixture_of_signs_and_marks_breaks_it(text):
    for mode in MODES:
        assert score(f"#### {text}1", f"{text}1", mode) in (0.0, 1.0)
