"""SIGTERM: the machine is taken away soon. What is done is saved, and the process ends with status 0 for a restart."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jaxppo.parallel.distributed import any_process


class Preempted(Exception):
    """Raised at a place where the state is whole and nothing of the current step has entered it."""


class Notice:
    """Whether the signal has come."""

    def __init__(self) -> None:
        self.given = False

    def check(self) -> None:
        """Raises Preempted after the signal, on all processes if any has heard it."""
        if any_process(self.given):
            raise Preempted


@contextmanager
def preemption() -> Iterator[Notice]:
    """Listens to SIGTERM meanwhile; Python hears of signals in its main thread alone."""
    notice = Notice()
    if threading.current_thread() is not threading.main_thread():
        yield notice
        return

    def heard(number: int, frame: object) -> None:
        notice.given = True

    before = signal.signal(signal.SIGTERM, heard)
    try:
        yield notice
    finally:
        signal.signal(signal.SIGTERM, before)
