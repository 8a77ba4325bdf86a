"""The engine's end of start-up progress: one datagram at each step, to whoever listens."""

import contextlib
import socket

from omni_server.protocol.local_socket import socket_address
from omni_server.protocol.start_report import Phase, PhaseReport, ProgressSpec, encode_report


class ProgressReporter:
    """Made in the worker. Without a `spec` (an engine that nobody watches) it sends nothing."""

    def __init__(self, spec: ProgressSpec | None) -> None:
        self._spec = spec

    def report(self, phase: Phase, detail: str = "") -> None:
        """Never blocks and never fails: a start does not depend on being watched."""
        if self._spec is None:
            return
        message = encode_report(PhaseReport(self._spec.stage, phase, detail))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            # The server has stopped listening, or does not keep up: the next report tells more than this one.
            with contextlib.suppress(OSError):
                sender.sendto(message, socket_address(self._spec.socket))
