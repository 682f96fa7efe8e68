"""Several processes as one run: how they find each other, what they tell each other, and how they end together."""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np

from jaxppo.config import ConfigError, DistributedConfig, UserError

T = TypeVar("T")
FAILED = "jaxppo/failed"
POLL_SECONDS = 1.0
"""Between two looks at whether another process has failed."""
FAREWELL_SECONDS = 5.0
"""How long a failed process stays, so that all others read why before their coordinator may be gone."""


def start(config: DistributedConfig) -> None:
    """Joins the run's other processes; a process alone starts nothing. Call it before jax touches a device.

    Raises ConfigError where what was given contradicts itself, UserError where the others are not found in time.
    """
    found = find_cluster(config, os.environ)
    if found is None or jax.distributed.is_initialized():
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            **found,
            initialization_timeout=config.initialization_timeout_s,
            heartbeat_timeout_seconds=config.heartbeat_timeout_s,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"distributed: the processes did not find each other ({str(error).splitlines()[0]})") from None


def find_cluster(config: DistributedConfig, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What jax.distributed.initialize needs to be told; None for a process alone.

    Settings come first, then JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (in a Kubernetes job the
    id may be JOB_COMPLETION_INDEX), then SLURM and Open MPI, whose own variables jax reads itself.
    """
    names = ("coordinator_address", "num_processes", "process_id")
    given = {name: getattr(config, name) for name in names}
    source = "distributed."
    if all(value is None for value in given.values()):
        source = "JAX_"
        process = environ.get("JAX_PROCESS_ID", environ.get("JOB_COMPLETION_INDEX"))
        given = {
            "coordinator_address": environ.get("JAX_COORDINATOR_ADDRESS"),
            "num_processes": _integer("JAX_NUM_PROCESSES", environ.get("JAX_NUM_PROCESSES")),
            "process_id": _integer("JAX_PROCESS_ID", process),
        }
        if given["coordinator_address"] is None and given["num_processes"] is None:
            tasks = [environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")]
            return {} if any(x.isdigit() and int(x) > 1 for x in tasks) else None
    missing = [name for name, value in given.items() if value is None]
    spelled = {name: f"{source}{name if source == 'distributed.' else name.upper()}" for name in names}
    if missing:
        raise ConfigError(
            f"{spelled[missing[0]]} is missing: {', '.join(spelled[n] for n in names)} are given together, or none"
        )
    if not 0 <= given["process_id"] < given["num_processes"]:
        raise ConfigError(
            f"{spelled['process_id']} = {given['process_id']}: must lie between 0 and {spelled['num_processes']} - 1 = "
            f"{given['num_processes'] - 1}"
        )
    return given if given["num_processes"] > 1 else None


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


@contextmanager
def ending_together() -> Iterator[None]:
    """If one process fails, all end within seconds, with its message and a status that is not 0."""
    if jax.process_count() == 1:
        yield
        return
    ending = threading.Event()
    threading.Thread(target=_watch, args=(_client(), ending), daemon=True).start()
    try:
        yield
    except BaseException as error:
        if ending.is_set():  # what is raised now follows from the other's end, which the watching thread tells
            time.sleep(2 * FAREWELL_SECONDS)
        ending.set()
        own = isinstance(error, UserError)
        if not own:
            traceback.print_exc()
        _client().key_value_set(FAILED, _message(error), allow_overwrite=True)
        _end(f"error: {_message(error)}", 2 if own else 1, FAREWELL_SECONDS)


def gather_json(value: Any) -> list[Any]:
    """Every process's value (what JSON can hold), in the processes' order. A collective: all processes call it."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int64(len(data)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(data)] = data
    gathered = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size])) for row, size in zip(gathered, sizes.tolist(), strict=True)]


def from_first(make: Callable[[], T]) -> T:
    """What the first process makes (what JSON can hold), on all of them. A collective."""
    if jax.process_count() == 1:
        return make()
    return gather_json(make() if is_first() else None)[0]


def any_process(here: bool) -> bool:
    """Whether it is so on any process. A collective."""
    return any(gather_json(here)) if jax.process_count() > 1 else here


def share_work(work: Callable[[Sequence[Any]], list[Any]], items: Sequence[Any]) -> list[Any]:
    """work(items) in their order, each process on every n-th item; results are what JSON can hold. A collective."""
    processes = jax.process_count()
    if processes == 1:
        return work(items)
    mine = work(items[jax.process_index() :: processes])
    everything = gather_json(mine)
    return [everything[i % processes][i // processes] for i in range(len(items))]


def _watch(client: Any, ending: threading.Event) -> None:
    while not ending.is_set():
        time.sleep(POLL_SECONDS)
        try:
            message = client.key_value_try_get(FAILED)
        except jax.errors.JaxRuntimeError:  # not there: all is well
            continue
        if ending.is_set():
            return
        ending.set()
        # the first process serves the others: it goes last
        _end(f"error: {message}", 1, FAREWELL_SECONDS if is_first() else 0)


def _message(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    reason = text[0] if text else ""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"process {jax.process_index()}: {kind}{reason}"


def _end(line: str, status: int, delay: float) -> None:
    """Not by an exception: jax would wait at its exit for processes that wait for this one."""
    print(line, file=sys.stderr, flush=True)
    sys.stdout.flush()
    time.sleep(delay)
    os._exit(status)


def _client() -> Any:
    """The coordination service's; jax has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client


def _integer(name: str, value: str | None) -> int | None:
    if value is None or value.isdigit():
        return None if value is None else int(value)
    raise ConfigError(f"{name} = {value}: must be a number")
