"""How processes find each other, and what they share; with real processes in tests/end_to_end."""

import pytest

from jaxppo.config import ConfigError, DistributedConfig
from jaxppo.parallel.distributed import any_process, find_cluster, from_first, gather_json, share_work

FOUND = {"coordinator_address": "host:1", "num_processes": 4, "process_id": 3}
VARIABLES = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


@pytest.mark.parametrize(
    ("config", "environ", "expected"),
    [
        ({}, {}, None),
        ({}, {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({}, {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4"}, {}),
        ({}, {"OMPI_COMM_WORLD_SIZE": "2"}, {}),
        ({}, VARIABLES, FOUND),
        ({}, {**VARIABLES, "SLURM_STEP_NUM_TASKS": "9"}, FOUND),
        ({}, {**{k: v for k, v in VARIABLES.items() if "ID" not in k}, "JOB_COMPLETION_INDEX": "3"}, FOUND),
        ({}, {**VARIABLES, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        (FOUND, {}, FOUND),
        (FOUND, {**VARIABLES, "JAX_PROCESS_ID": "0"}, FOUND),
    ],
)
def test_how_processes_find_each_other(config, environ, expected):
    assert find_cluster(DistributedConfig(**config), environ) == expected


@pytest.mark.parametrize(
    ("config", "environ", "message"),
    [
        ({"num_processes": 2}, {}, r"distributed.coordinator_address is missing: .* given together, or none"),
        ({**FOUND, "process_id": 4}, {}, r"distributed.process_id = 4: must lie between 0 and .* - 1 = 3"),
        ({}, {"JAX_NUM_PROCESSES": "2"}, r"JAX_COORDINATOR_ADDRESS is missing"),
        ({}, {**VARIABLES, "JAX_NUM_PROCESSES": "two"}, r"JAX_NUM_PROCESSES = two: must be a number"),
    ],
)
def test_contradictions_are_one_line(config, environ, message):
    with pytest.raises(ConfigError, match=message):
        find_cluster(DistributedConfig(**config), environ)


def test_a_process_alone_asks_nobody():
    assert gather_json({"a": 1}) == [{"a": 1}]
    assert from_first(lambda: 3) == 3
    assert any_process(True)
    assert not any_process(False)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_shares_may_be_uneven_and_results_keep_their_order(monkeypatch, processes):
    import jax

    from jaxppo.parallel import distributed

    items = list(range(7))
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    parts = [[x * 10 for x in items[i::processes]] for i in range(processes)]
    monkeypatch.setattr(distributed, "gather_json", lambda mine: parts)
    for index in range(processes):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        asked = []

        def work(mine, asked=asked):
            asked += mine
            return [x * 10 for x in mine]

        assert share_work(work, items) == [x * 10 for x in items]
        assert asked == (items if processes == 1 else items[index::processes])
