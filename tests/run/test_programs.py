"""Out of memory: smaller microbatches as long as there are any, then the settings that would help."""

import pytest

from jaxppo.config import ActorConfig, Config, DataConfig, MeshConfig, UserError
from jaxppo.run.programs import with_less_memory


def config_of(tokens: int, row_length: int | None, **mesh: int) -> Config:
    return Config(
        data=DataConfig(max_prompt_length=4, max_response_length=6),
        actor=ActorConfig(max_tokens_per_device=tokens, row_length=row_length),
        mesh=MeshConfig(**mesh),
    )


@pytest.mark.parametrize(
    ("tokens", "row_length", "rows", "shape"),
    [
        (200, 20, 10, (160, 20)),
        (1000, 20, 10, (160, 20)),  # a fifth of what is used, not of what is allowed
        (100, 20, 5, (80, 20)),
        (60, 20, 3, (40, 20)),  # 48 tokens are 2 rows
        (40, 20, 2, (20, 20)),
        (200, None, 5, (160, 40)),  # rows keep their length as long as there are several
        (40, None, 1, (32, 32)),
        (12, None, 1, (10, 10)),
    ],
)
def test_a_fifth_less_in_whole_rows_then_shorter_rows(tokens, row_length, rows, shape):
    smaller = with_less_memory(config_of(tokens, row_length), rows)
    assert (smaller.actor.max_tokens_per_device, smaller.row_length) == shape


def test_devices_that_share_rows_have_their_part_each():
    smaller = with_less_memory(config_of(20, 20, context=2), 2)
    assert (smaller.actor.max_tokens_per_device, smaller.row_length) == (10, 20)


@pytest.mark.parametrize("row_length", [20, None])
def test_below_one_row_the_settings_are_named(row_length):
    config = config_of(20 if row_length else 10, row_length)
    with pytest.raises(UserError, match=r"out of memory with one row of \d0 tokens: .*data\.max_response_length"):
        with_less_memory(config, 1)
