import pytest

from jaxppo.rewards.gsm8k import score

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
    ("#### .", "1", 0, 0, 0),
    ("", "1", 0, 0, 0),
]


@pytest.mark.parametrize(("response", "truth", "verl", "flexible", "robust"), TABLE)
def test_the_docstrings_table(response, truth, verl, flexible, robust):
    assert [score(response, truth, mode) for mode in ("verl", "verl_flexible", "robust")] == [verl, flexible, robust]


@pytest.mark.parametrize("mode", ["verl", "verl_flexible", "robust"])
@pytest.mark.parametrize(
    "response", [None, 18, "#### " + "9" * 100_000, "#" * 100_000, "#### " + "-$" * 50_000, "#### " + "1," * 50_000]
)
def test_no_input_breaks_it(mode, response):
    assert score(response, "9", mode) == 0.0
