"""Simulated CUDA that runs by itself, each stream in a thread of its own, as a GPU does: a stream
may wait for another device while the host and the other streams go on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from tests.fakes.cuda import Clock, FakeCuda, Stream

HANGS_S = 60.0  # without any progress of what is waited for


class DrivenCuda(FakeCuda):
    """Devices that exchange share `changed`, which is notified of all that happens on one of them.
    What waits for another device gives up its lock. It runs within a context."""

    def __init__(self, changed: threading.Condition, *, hangs_s: float = HANGS_S) -> None:
        super().__init__()
        self.steps_may_wait = True
        self._changed = changed
        self._hangs_s = hangs_s
        self._is_closed = False
        self.lock = changed._lock  # type: ignore[attr-defined]  # an RLock
        self._threads: list[threading.Thread] = []
        self._drive(self._streams[0])

    def new_stream(self) -> Stream:
        stream = super().new_stream()
        self._drive(stream)
        return stream

    def enqueue(self, stream: Stream, work: Callable[[], object]) -> None:
        stream.queue.append(work)
        stream.clock[stream.number] += 1
        self._changed.notify_all()

    def run_until(self, clock: Clock) -> None:
        """Waits for it."""

        def is_done() -> bool:
            streams = self._streams
            is_over = self._fault is not None
            return is_over or all(streams[n].num_done >= place for n, place in clock.items())

        assert self._changed.wait_for(is_done, self._hangs_s), "the device hangs"
        self.check_alive()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _drive(self, stream: Stream) -> None:
        thread = threading.Thread(target=self._run, args=(stream,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, stream: Stream) -> None:
        with self._changed, torch.inference_mode():
            while True:
                self._changed.wait_for(lambda: stream.queue or self._is_closed)
                if self._is_closed:
                    return
                try:
                    stream.queue.popleft()()
                except Exception as error:
                    self.break_down(f"{type(error).__name__}: {error}")
                stream.num_done += 1
                self._changed.notify_all()
