"""A process that calls one reward function: python -m jaxppo.rewards.worker FD, started by `pool`.

It gets (function's name, time-out, bytes of memory) and then lists of samples from the run, which it trusts. It says
only JSON, since what runs here may be anything: first its function's form, or why there is none; then for each sample
[position in the list, score, further numbers, failure, reason].
"""

import json
import os
import resource
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from jaxppo.config import ConfigError
from jaxppo.rewards.calling import Caller, Outcome
from jaxppo.rewards.functions import load_function

OUT_OF_MEMORY = 77
"""The exit status that says so."""


def main(fd: int) -> None:
    """Ends when the run closes its side, or dies."""
    connection = Connection(fd)
    os.set_inheritable(fd, False)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    name, timeout_s, memory = connection.recv()
    _limit(memory)
    try:
        caller = Caller(load_function(name), timeout_s)
    except ConfigError as error:
        return _say(connection, {"error": str(error)})
    _say(connection, {"form": caller.form})

    def report(i: int, outcome: Outcome) -> None:
        further = outcome.further if outcome.pred is None else {**outcome.further, "pred": outcome.pred}
        _say(connection, [i, outcome.score, further, outcome.failure, outcome.reason])

    while True:
        try:
            samples = connection.recv()
        except EOFError:
            return None
        try:
            caller.run(samples, report)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # what holds the memory would fail the next samples too


def _say(connection: Connection, message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _limit(memory: int) -> None:
    """Private memory, which is what allocations are; a crash leaves no core file."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_with(parent: int) -> None:
    """A function that hangs never sees that the run is gone: this thread does, and takes its whole group along."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
