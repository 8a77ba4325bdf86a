"""Spaces out the steps of language models while the decoder computes on the GPU that they share.

With many active streams the decoder is the bottleneck. A language model that then steps as fast as it can
makes small batches, which cost as much as large ones, and its codec tokens wait behind those of all other
streams. So while the decoder is busy, which it announces on a local socket, a stage's steps start at a
minimum interval proportional to the number of active streams.

The benefit for W1 on one H200 is 48.4 instead of 46.2 seconds of audio per second at 16 callers (measured),
and first audio after 1.35 instead of 1.58 s at 64 callers (simulated; benchmarks/scheduler.md).
"""

import contextlib
import math
import time
from collections.abc import Iterator

import msgspec

from omni_server.protocol.local_socket import bound_socket, receive_own, send_datagram
from omni_server.protocol.runtime_config import StepThrottleSpec

GAP_S = 0.05
"""Seconds for which the decoder still counts as busy after a batch: the next one is about to start."""

MAX_INTERVAL_S = 0.018
"""Longest interval in seconds for any number of streams. Beyond it, a language model that makes a frame, or a
row for one, per 20 ms of speech falls behind playback."""

MAX_AGE_S = 1.0
"""A batch counts as ended this many seconds after its start, even without a message. None takes nearly as
long."""

MAX_MESSAGE_BYTES = 256


class BatchNotice(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON datagram: a decoder batch begins or has ended."""

    is_running: bool
    num_streams: int
    """Streams that need the decoder."""
    sent_at: float
    """`time.monotonic()`, a clock shared by all processes of a machine."""


_decoder = msgspec.json.Decoder(BatchNotice)


class BatchAnnouncer:
    """The sender, in the decoder's worker."""

    def __init__(self, sockets: tuple[str, ...]) -> None:
        """`sockets`: `StepThrottleSpec.socket` of each listening stage."""
        self._sockets = sockets

    @contextlib.contextmanager
    def announced(self, num_streams: int) -> Iterator[None]:
        """Announces the start and the end of the batch computed in this context, even if it fails."""
        self._send(is_running=True, num_streams=num_streams)
        try:
            yield
        finally:
            self._send(is_running=False, num_streams=num_streams)

    def _send(self, *, is_running: bool, num_streams: int) -> None:
        if self._sockets:
            notice = BatchNotice(is_running=is_running, num_streams=num_streams, sent_at=time.monotonic())
            send_datagram(msgspec.json.encode(notice), self._sockets)


class StepThrottle:
    """The listener, in the worker of a language model."""

    def __init__(self, spec: StepThrottleSpec) -> None:
        """Listens from now on."""
        self._socket = bound_socket(spec.socket)
        self._socket.setblocking(False)
        self._spec = spec
        self._last: BatchNotice | None = None
        self._step_began_at = -math.inf

    def wait(self) -> None:
        """Call before a step. Returns when the step may begin.

        If no batch has been announced, this costs one receive attempt, a few microseconds.
        """
        self._receive()
        time.sleep(max(0.0, self._step_began_at + self._interval_s() - time.monotonic()))
        self._step_began_at = time.monotonic()

    def _interval_s(self) -> float:
        """Seconds between the starts of two steps."""
        last = self._last
        if last is None or time.monotonic() - last.sent_at >= (MAX_AGE_S if last.is_running else GAP_S):
            return 0.0
        num_streams = min(last.num_streams, self._spec.max_streams)
        return min(self._spec.interval_per_stream_s * num_streams, MAX_INTERVAL_S)

    def _receive(self) -> None:
        """Receive all pending datagrams. Drops anything but a notice, because any local process may send."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data = receive_own(self._socket, MAX_MESSAGE_BYTES)
                with contextlib.suppress(ValueError):
                    self._last = self._last if data is None else _decoder.decode(data)

    def close(self) -> None:
        self._socket.close()
