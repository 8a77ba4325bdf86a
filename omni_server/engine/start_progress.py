"""Progress for the user while engines start: the phases of each stage, with the time since its start
began."""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from omni_server.protocol.start_report import (
    Phase,
    PhaseReport,
    ProgressSpec,
    bound_socket,
    new_socket_name,
    receive_report,
)

LONGEST_SILENCE_S = 15.0
"""After this time without a report, a line says what is being waited for."""


class StartProgress:
    """Listens to the engines while it is entered, in a running event loop, and passes on a line per phase.

    Engines report by datagram. Reports are never waited for: a dead or silent engine blocks nothing.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._listener = on_line
        self._last_line = time.monotonic()
        self._socket_name = new_socket_name()
        self._began: dict[str, float] = {}
        """Stages that are starting."""
        self._phases: dict[str, str] = {}
        """The last phase that each stage has reported."""

    def __enter__(self) -> "StartProgress":
        self._loop = asyncio.get_running_loop()
        self._socket = bound_socket(self._socket_name)
        self._loop.add_reader(self._socket, self._read)
        self._next_look = self._loop.call_later(LONGEST_SILENCE_S, self._break_silence)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._next_look.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def began(self, stage: str) -> ProgressSpec:
        """Marks a stage whose engine is about to be built. Returns what its worker needs to report."""
        self._began[stage] = time.monotonic()
        self._on_line(f"{stage}: starting")
        return ProgressSpec(stage, self._socket_name)

    def is_ready(self, stage: str) -> None:
        """Marks the stage's engine as up."""
        self._read()  # shows reports from before it became ready first
        self._say(stage, "ready")
        del self._began[stage]

    def last_phase(self, stage: str) -> str | None:
        """Returns the phase that the stage has reported last, or None if it has not reported yet."""
        self._read()
        return self._phases.get(stage)

    def _say(self, stage: str, what: str) -> None:
        self._on_line(f"{stage}: {what} after {time.monotonic() - self._began[stage]:.1f} s")

    def _on_line(self, line: str) -> None:
        self._last_line = time.monotonic()
        self._listener(line)

    def _break_silence(self) -> None:
        if self._began and time.monotonic() - self._last_line >= LONGEST_SILENCE_S:
            stages = (f"{stage} ({self._phases.get(stage, 'starting')})" for stage in self._began)
            self._on_line(f"waiting for {', '.join(stages)}")
        wait_s = max(0.1, self._last_line + LONGEST_SILENCE_S - time.monotonic())
        self._next_look = self._loop.call_later(wait_s, self._break_silence)

    def _read(self) -> None:
        while True:
            try:
                report = receive_report(self._socket)
            except BlockingIOError:
                return
            if report is not None:
                self._show(report)

    def _show(self, report: PhaseReport) -> None:
        if report.stage not in self._began:
            return
        phase = self._phases[report.stage] = report.phase.value
        match report.phase:
            case Phase.LOADED:
                self._say(report.stage, phase)
            case Phase.BUDGETED:
                self._on_line(f"{report.stage}: {report.detail}")
            case _:
                self._on_line(f"{report.stage}: {phase}")
