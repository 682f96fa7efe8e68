"""GSM8K's raw rows in verl's columns."""

from typing import Any

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def gsm8k_row(row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """{question, answer: "... #### 1,234"} -> verl's row with ground_truth "1234"."""
    question, answer = row["question"], row["answer"]
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.rpartition("####")[2].strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }
