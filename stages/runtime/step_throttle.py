"""Language models delay their steps while code2wav computes on the GPU that they share.

The first window of an utterance is hundreds of small kernels, each of which waits for the one before it.
Beside the large, memory-bound steps of a language model it takes several times as long as alone, and the
GPU's own priorities change little. So code2wav announces such a batch on a local socket, and a stage of low
priority pauses before its next step, within a budget.

With many active streams code2wav is the bottleneck. A language model that steps as fast as it can then makes
small batches, which cost as much as large ones, and codes that wait behind those of all other streams. So
while code2wav is busy, a stage's steps begin at a minimum interval, in proportion to the number of active
streams.
"""

import contextlib
import math
import socket
import time
from collections.abc import Iterator

from omni_server.protocol.give_way import BatchNotice, GiveWaySpec, decode_notice, encode_notice
from omni_server.protocol.local_socket import bound_socket, receive_own, socket_address

MAX_PAUSE_S = 0.015
"""Longest single pause, of the about 35 ms that a first window takes on a GPU of its own. Pausing for all of
them makes first audio 15 to 20 ms earlier and every answer as much longer (docs/performance.md)."""

PAUSE_SAVINGS_S = 0.06
"""Size of the pause budget: what batches in close succession may use up."""

PAUSE_PER_SECOND = 0.5
"""Seconds of pause that a second without one earns. When one urgent batch follows the other, a stage keeps at
least two thirds of its time, so that steps of up to 13 ms still come every 20 ms: the thinker's, of which the
talker needs one per 20 ms of speech."""

GAP_S = 0.05
"""After a batch that ended less than this ago, the next one is about to begin."""

WIDE_INTERVAL_S = 0.005
"""Steps this far apart leave enough room already; first windows are then so frequent that pauses would add
up."""

MAX_INTERVAL_S = 0.018
"""Longest interval, however many streams: the talker makes a code per 20 ms of speech, from a row of the
thinker, or falls behind playback."""

MAX_QUEUED = 10
"""Messages that Linux queues by default for a socket that nobody reads; it drops those that follow."""

MAX_AGE_S = 1.0
"""A batch that began longer ago counts as ended, even without a message. None takes nearly as long."""

MAX_MESSAGE_BYTES = 256


class BatchAnnouncer:
    """The sending end, in code2wav's worker."""

    def __init__(self, listeners: tuple[GiveWaySpec, ...]) -> None:
        self._addresses = [socket_address(listener.socket) for listener in listeners]

    @property
    def has_listeners(self) -> bool:
        return bool(self._addresses)

    @contextlib.contextmanager
    def announced(self, *, is_urgent: bool, num_streams: int) -> Iterator[None]:
        """Announces the beginning and the end of a batch that is computed inside, also of one that fails."""
        self._send(is_running=True, is_urgent=is_urgent, num_streams=num_streams)
        try:
            yield
        finally:
            self._send(is_running=False, is_urgent=is_urgent, num_streams=num_streams)

    def _send(self, *, is_running: bool, is_urgent: bool, num_streams: int) -> None:
        """Never blocks and never fails: a batch does not depend on its listeners."""
        notice = BatchNotice(
            is_running=is_running, is_urgent=is_urgent, num_streams=num_streams, sent_at=time.monotonic()
        )
        message = encode_notice(notice)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            for address in self._addresses:
                # The stage has ended, or has made no step for so long that its socket is full.
                with contextlib.suppress(OSError):
                    sender.sendto(message, address)


class PauseBudget:
    """A token bucket of seconds, full at first. Times are seconds of one clock, of any origin."""

    def __init__(self, now: float) -> None:
        self._left_s = PAUSE_SAVINGS_S
        self._changed_at = now

    def left_s(self, now: float) -> float:
        """How long a pause that begins now may be; not positive if there should be none."""
        return min(PAUSE_SAVINGS_S, self._left_s + PAUSE_PER_SECOND * (now - self._changed_at))

    def paused(self, began: float, ended: float) -> None:
        """A pause earns nothing while it lasts. One that took too long leaves a debt."""
        self._left_s = self.left_s(began) - (ended - began)
        self._changed_at = ended


class StepThrottle:
    """The listening end, in the worker of a language model.

    A stage pauses once per urgent batch. If the batch outlasts the longest pause or the budget, it gets no
    further pause, and what is earned meanwhile is kept for the next one. Short pauses before each step would
    help little: with async scheduling a step is prepared while the one before it runs, and a shorter pause
    than that has no effect.
    """

    def __init__(self, spec: GiveWaySpec) -> None:
        """Listens from now on."""
        self._socket = bound_socket(spec.socket)
        self._spec = spec
        self._budget = PauseBudget(time.monotonic())
        self._last: BatchNotice | None = None
        self._step_began_at = -math.inf
        self.num_pauses = 0
        self.paused_s = 0.0

    def wait(self) -> None:
        """To be called before a step: returns when the step may begin.

        A pause counts towards the interval since the last step. Where no batch has been announced, this costs
        one attempt to receive, a few microseconds.
        """
        newest = self._newest()
        if newest is not None:
            self._last = newest
        now = time.monotonic()
        interval_s = self._interval_s(now)
        is_urgent = newest is not None and newest.is_running and newest.is_urgent
        if newest is not None and is_urgent and self._spec.pauses and interval_s < WIDE_INTERVAL_S:
            self._pause(newest, now)
        time.sleep(max(0.0, self._step_began_at + interval_s - time.monotonic()))
        self._step_began_at = time.monotonic()

    def _interval_s(self, now: float) -> float:
        """Between the beginnings of two steps."""
        last = self._last
        if last is None or now - last.sent_at >= (MAX_AGE_S if last.is_running else GAP_S):
            return 0.0
        num_streams = min(last.num_streams, self._spec.max_streams)
        return min(self._spec.step_interval_per_stream_s * num_streams, MAX_INTERVAL_S)

    def _pause(self, batch: BatchNotice, now: float) -> None:
        left_s = min(self._budget.left_s(now), MAX_PAUSE_S)
        if left_s <= 0 or now - batch.sent_at > MAX_AGE_S:
            return
        self._wait_for_end(now + left_s)
        ended = time.monotonic()
        self._budget.paused(now, ended)
        self.num_pauses += 1
        self.paused_s += ended - now

    def _newest(self) -> BatchNotice | None:
        """The last message received; None where later ones may have been dropped."""
        self._socket.setblocking(False)
        newest: BatchNotice | None = None
        num_received = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                newest = self._receive() or newest
                num_received += 1
        if num_received >= MAX_QUEUED:
            newest = self._last = None
        return newest

    def _wait_for_end(self, deadline: float) -> None:
        while (left_s := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                message = self._receive()
            except TimeoutError:
                return
            if message is not None:
                self._last = message
                if not message.is_running:
                    return

    def _receive(self) -> BatchNotice | None:
        """One message; None for anything else, which any process of this machine may send."""
        data = receive_own(self._socket, MAX_MESSAGE_BYTES)
        if data is None:
            return None
        try:
            return decode_notice(data)
        except ValueError:
            return None

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()
