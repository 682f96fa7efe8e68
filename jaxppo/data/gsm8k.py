"""GSM8K's raw rows in verl's columns."""

from typing import Any

from jaxppo.config import UserError

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def is_raw_gsm8k(row: dict[str, Any], prompt_key: str) -> bool:
    """Whether the row has GSM8K's columns and no prompt of its own."""
    return {"question", "answer"} <= row.keys() and prompt_key not in row


def gsm8k_row(row: dict[str, Any], split: str, index: int, where: str) -> dict[str, Any]:
    """{question, answer: "... #### 1,234"} -> verl's row with ground_truth "1234". `where` names the row in errors."""
    question, answer = row.get("question"), row.get("answer")
    if not (isinstance(question, str) and isinstance(answer, str) and "####" in answer):
        raise UserError(
            f"{where}: not a row of GSM8K: it needs a question and an answer that ends in #### and a number"
        )
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.rpartition("####")[2].strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }
