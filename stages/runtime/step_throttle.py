"""Language models start their steps further apart while the decoder computes on the GPU that they share.

With many active streams the decoder is the bottleneck. A language model that steps as fast as it can then
makes small batches, which cost as much as large ones, and codec tokens that wait behind those of all other
streams. So while the decoder is busy, which it announces on a local socket, a stage's steps begin at a minimum
interval, in proportion to the number of active streams.

The benefit for W1 on one H200 is 48.4 instead of 46.2 seconds of audio per second at 16 callers (measured),
and first audio after 1.35 instead of 1.58 s at 64 callers (simulated; benchmarks/scheduler.md).
"""

import contextlib
import math
import socket
import time
from collections.abc import Iterator

import msgspec

from omni_server.protocol.local_socket import bound_socket, receive_own, socket_address
from omni_server.protocol.runtime_config import StepThrottleSpec

GAP_S = 0.05
"""Seconds after the end of a batch for which the decoder still counts as busy: the next batch is about to
begin."""

MAX_INTERVAL_S = 0.018
"""Longest interval in seconds, however many streams: a language model that makes a frame per 20 ms of speech,
or a row for each, falls behind playback beyond that."""

MAX_AGE_S = 1.0
"""A batch that began so many seconds ago counts as ended, even without a message. None takes nearly as
long."""

MAX_MESSAGE_BYTES = 256


class BatchNotice(msgspec.Struct, frozen=True, kw_only=True):
    """One datagram, as JSON: a batch of the decoder begins, or has ended."""

    is_running: bool
    num_streams: int
    """Streams that need the decoder."""
    sent_at: float
    """`time.monotonic()`, which is one clock for all processes of a machine."""


_decoder = msgspec.json.Decoder(BatchNotice)


class BatchAnnouncer:
    """The sending end, in the decoder's worker."""

    def __init__(self, sockets: tuple[str, ...]) -> None:
        """`sockets`: `StepThrottleSpec.socket` of each stage that listens."""
        self._addresses = [socket_address(name) for name in sockets]

    @property
    def has_listeners(self) -> bool:
        return bool(self._addresses)

    @contextlib.contextmanager
    def announced(self, num_streams: int) -> Iterator[None]:
        """Announces the beginning and the end of a batch that is computed inside, also of one that fails."""
        self._send(is_running=True, num_streams=num_streams)
        try:
            yield
        finally:
            self._send(is_running=False, num_streams=num_streams)

    def _send(self, *, is_running: bool, num_streams: int) -> None:
        """Never blocks and never fails: a batch does not depend on its listeners."""
        notice = BatchNotice(is_running=is_running, num_streams=num_streams, sent_at=time.monotonic())
        message = msgspec.json.encode(notice)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            for address in self._addresses:
                # The stage has ended, or has made no step for so long that its socket is full.
                with contextlib.suppress(OSError):
                    sender.sendto(message, address)


class StepThrottle:
    """The listening end, in the worker of a language model."""

    def __init__(self, spec: StepThrottleSpec) -> None:
        """Listens from now on."""
        self._socket = bound_socket(spec.socket)
        self._socket.setblocking(False)
        self._spec = spec
        self._last: BatchNotice | None = None
        self._step_began_at = -math.inf

    def wait(self) -> None:
        """To be called before a step: returns when the step may begin.

        Where no batch has been announced, this costs one attempt to receive, a few microseconds.
        """
        self._receive()
        time.sleep(max(0.0, self._step_began_at + self._interval_s() - time.monotonic()))
        self._step_began_at = time.monotonic()

    def _interval_s(self) -> float:
        """Between the beginnings of two steps."""
        last = self._last
        if last is None or time.monotonic() - last.sent_at >= (MAX_AGE_S if last.is_running else GAP_S):
            return 0.0
        num_streams = min(last.num_streams, self._spec.max_streams)
        return min(self._spec.interval_per_stream_s * num_streams, MAX_INTERVAL_S)

    def _receive(self) -> None:
        """Everything that has been sent. Anything but a notice is dropped: any process of this machine may
        send."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data = receive_own(self._socket, MAX_MESSAGE_BYTES)
                with contextlib.suppress(ValueError):
                    self._last = self._last if data is None else _decoder.decode(data)

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()
