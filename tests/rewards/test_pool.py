"""Real processes that raise, exit, crash, hang and eat memory."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxppo.config import ConfigError, RewardConfig, UserError
from jaxppo.rewards.calling import Sample
from jaxppo.rewards.pool import WorkerPool
from jaxppo.rewards.scoring import Reward, open_reward

FUNCTIONS = '''
import asyncio, ctypes, os, re, subprocess, sys, time

seen = []


def faulty(data_source, solution_str, ground_truth, extra_info):
    """Fails in the way that the response says."""
    match solution_str:
        case "raise":
            raise RuntimeError("as told")
        case "sys.exit":
            sys.exit(1)
        case "nan":
            return float("nan")
        case "os._exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "hang":
            while True:
                time.sleep(1)
        case "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "swallow":
            while True:
                try:
                    time.sleep(1)
                except BaseException:
                    pass
        case "allocate":
            return len(bytearray(1 << 30))
        case "close":
            os.closerange(3, 256)
    return extra_info["index"]


async def awaiting(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "sleep":
        await asyncio.sleep(60)
    return faulty(data_source, solution_str, ground_truth, extra_info)


def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [faulty(*sample) for sample in zip(data_sources, solution_strs, ground_truths, extra_infos)]


def remembering(data_source, solution_str, ground_truth, extra_info):
    """Changes all that it can reach."""
    extra_info["index"] += 1000
    os.environ["JAXPPO_TEST_REWARD"] = "changed"
    seen.append(solution_str)
    return extra_info["index"] - 1000


def surroundings(data_source, solution_str, ground_truth, extra_info):
    return {
        "score": 0,
        "jax": "jax" in sys.modules,
        "numpy": "numpy" in sys.modules,
        "gpus": len(os.environ["CUDA_VISIBLE_DEVICES"]),
        "pid": os.getpid(),
    }


def with_child(data_source, solution_str, ground_truth, extra_info):
    child = subprocess.Popen(["sleep", "600"])
    with open(ground_truth, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


def flaky(data_source, solution_str, ground_truth, extra_info):
    """Takes its worker down the first time."""
    if os.path.exists(ground_truth):
        return 1.0
    open(ground_truth, "w").close()
    os._exit(1)


def forging(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] == 3:
        for fd in range(3, 30):
            try:
                os.write(fd, b"\\0\\0\\0\\x02[]")
            except OSError:
                pass
    return extra_info["index"]
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def make_reward(file) -> Iterator:
    opened = []

    def make(name: str, **settings) -> Reward:
        defaults = {"num_workers": 2, "timeout_s": 20.0, "memory_gb": 1.0, "retries": 0, "error_score": -1.0}
        opened.append(open_reward(RewardConfig(function=f"{file}:{name}", **(defaults | settings))))
        return opened[-1]

    yield make
    for reward in opened:
        reward.close()


def samples(texts: list[str]) -> list[Sample]:
    return [Sample("test", text, "1", {"index": i}) for i, text in enumerate(texts)]


def pids(reward: Reward) -> list[int]:
    return [worker.process.pid for worker in reward._run.__self__._workers]


def alive(pid: int) -> bool:
    """Zombies do not count: their parent is the one to see to them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition) -> None:
    for _ in range(200):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("still not so after 20 seconds")


def assert_costs_itself(reward: Reward, faults: dict[int, str], failures: dict[str, float]) -> None:
    texts = [faults.get(i, "fine") for i in range(40)]
    result = reward.score(samples(texts))
    assert result.scores.tolist() == [-1.0 if i in faults else i for i in range(40)]
    assert {i for i, error in enumerate(result.errors) if error is not None} == faults.keys()
    assert result.failures == {"reward/errors": 0.0, "reward/timeouts": 0.0, "reward/crashes": 0.0} | failures
    assert len(pids(reward)) == 2
    assert reward.score(samples(["fine"] * 5)).scores.tolist() == [0, 1, 2, 3, 4]


def test_raising_exiting_crashing_and_allocating_each_cost_one_sample(make_reward):
    faults = {0: "raise", 7: "sys.exit", 8: "os._exit", 9: "nan", 20: "segfault", 25: "allocate", 39: "close"}
    assert_costs_itself(make_reward("faulty"), faults, {"reward/errors": 3.0, "reward/crashes": 4.0})


def test_hanging_costs_one_sample(make_reward):
    faults = {3: "hang", 20: "regex", 21: "swallow", 30: "raise"}
    assert_costs_itself(make_reward("faulty", timeout_s=2.0), faults, {"reward/timeouts": 3.0, "reward/errors": 1.0})


def test_the_async_form_fails_sample_by_sample(make_reward):
    faults = {3: "sleep", 12: "raise", 13: "os._exit", 30: "hang"}
    assert_costs_itself(
        make_reward("awaiting", timeout_s=2.0),
        faults,
        {"reward/timeouts": 2.0, "reward/errors": 1.0, "reward/crashes": 1.0},
    )


def test_the_batched_form_fails_sample_by_sample(make_reward):
    faults = {3: "os._exit", 12: "raise", 30: "hang"}
    assert_costs_itself(
        make_reward("batched", timeout_s=2.0),
        faults,
        {"reward/timeouts": 1.0, "reward/errors": 1.0, "reward/crashes": 1.0},
    )


def test_the_reasons_name_the_setting(make_reward):
    result = make_reward("faulty", timeout_s=2.0).score(samples(["os._exit", "segfault", "hang", "allocate", "fine"]))
    assert result.errors == [
        "its process ended with status 3",
        "its process died of signal 11",
        "longer than reward.timeout_s = 2",
        "more memory than reward.memory_gb = 1",
        None,
    ]


def test_a_sample_is_tried_again(make_reward, tmp_path):
    once = [Sample("s", "", str(tmp_path / "mark"), {})]
    assert make_reward("flaky", retries=1).score(once).scores.tolist() == [1.0]
    (tmp_path / "mark").unlink()
    with pytest.raises(UserError, match="failed for 1 of 1 samples; the first: its process ended with status 1"):
        make_reward("flaky", retries=0).score(once)


def test_a_function_that_only_fails_does_not_wait_for_every_time_out(make_reward):
    with pytest.raises(UserError, match="failed 32 times and never gave a score: RuntimeError: as told"):
        make_reward("faulty").score(samples(["raise"] * 1000))


def test_scores_stand_in_the_samples_order_whoever_computes_them(make_reward):
    many = samples(["fine"] * 1024)
    one, three = make_reward("faulty", num_workers=1), make_reward("faulty", num_workers=3)
    assert one.score(many).scores.tolist() == three.score(many).scores.tolist() == list(range(1024))


def test_user_code_changes_neither_the_run_nor_its_neighbours(make_reward):
    shared = {"index": 7}
    result = make_reward("remembering").score([Sample("s", "", "1", shared)] * 30)
    assert result.scores.tolist() == [7.0] * 30
    assert shared == {"index": 7}
    assert "JAXPPO_TEST_REWARD" not in os.environ


def test_workers_are_light_and_stay(make_reward):
    reward = make_reward("surroundings")
    seen = set()
    for _ in range(3):
        metrics = reward.score(samples(["x"] * 64)).metrics
        for name in ("jax", "numpy", "gpus"):
            assert not metrics[f"reward/{name}"].any()
        seen |= set(metrics["reward/pid"].tolist())
    assert seen <= set(pids(reward))


def test_closing_ends_the_workers_and_what_they_started(make_reward, tmp_path):
    child = tmp_path / "pid"
    reward = make_reward("with_child", timeout_s=4.0, num_workers=1)
    (old,) = pids(reward)
    with pytest.raises(UserError, match="longer than reward.timeout_s = 4"):
        reward.score([Sample("s", "", str(child), {})])
    wait_until(lambda: not alive(int(child.read_text())))
    assert not alive(old)
    workers = pids(make_reward("faulty"))
    assert all(map(alive, workers))


def test_a_pool_that_is_dropped_ends_its_workers(file):
    pool = WorkerPool(RewardConfig(function=f"{file}:faulty", num_workers=2))
    workers = [worker.process.pid for worker in pool._workers]
    del pool
    wait_until(lambda: not any(map(alive, workers)))


def test_a_run_that_is_killed_leaves_no_worker_behind_not_even_one_that_hangs(file):
    code = (
        "from jaxppo.config import RewardConfig\n"
        "from jaxppo.rewards.calling import Sample\n"
        "from jaxppo.rewards.pool import WorkerPool\n"
        f"pool = WorkerPool(RewardConfig(function={str(file) + ':faulty'!r}, num_workers=2))\n"
        "print(*(worker.process.pid for worker in pool._workers), flush=True)\n"
        "pool.run([Sample('s', 'swallow', '1', {})])\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    workers = [int(pid) for pid in run.stdout.readline().split()]
    assert len(workers) == 2
    assert all(map(alive, workers))
    run.kill()
    run.wait()
    wait_until(lambda: not any(map(alive, workers)))


def test_a_worker_that_died_between_batches_costs_nothing(make_reward):
    reward = make_reward("faulty")
    before = pids(reward)
    os.kill(before[0], 9)
    wait_until(lambda: not alive(before[0]))
    assert reward.score(samples(["fine"] * 10)).scores.tolist() == list(range(10))
    assert len(pids(reward)) == 2
    assert before[0] not in pids(reward)


def test_a_worker_that_writes_what_it_likes_costs_what_it_was_given_at_most(make_reward):
    result = make_reward("forging").score(samples(["x"] * 40))
    wrong = [i for i, x in enumerate(result.scores.tolist()) if x != i]
    assert wrong == [i for i, error in enumerate(result.errors) if error is not None] == [3]


def test_a_file_that_cannot_be_loaded_is_one_line(file, tmp_path):
    with pytest.raises(ConfigError, match=r"has no function faultu \(did you mean faulty\?\)"):
        open_reward(RewardConfig(function=f"{file}:faultu", num_workers=2))
    (tmp_path / "exits.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(
        ConfigError, match=r"a worker ended before it had loaded it \(its process ended with status 5\)"
    ):
        open_reward(RewardConfig(function=f"{tmp_path}/exits.py:f", num_workers=2))
