"""Who may send a window to code2wav when."""

import asyncio

from omni_server.orchestrator.work_ahead import WorkAheadGate
from tests.unit.orchestrator.virtual_time import clock, run


class Windows:
    """Windows that ask for entry; `inside` names them in the order in which they got in."""

    def __init__(self, max_ahead_s: float | None) -> None:
        self.gate = WorkAheadGate(max_ahead_s, clock)
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, due: float) -> None:
        async def enter() -> None:
            await self.gate.enter(due)
            self.inside.append(name)

        self.tasks[name] = asyncio.create_task(enter())
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_is_due_within_the_cap_goes_at_once_whatever_else_is_there() -> None:
    async def work() -> None:
        windows = Windows(2.0)
        for number in range(10):
            await windows.ask(f"w{number}", due=2.0)
        assert len(windows.inside) == windows.gate.num_inside == 10

    run(work)


def test_without_a_cap_nothing_waits() -> None:
    async def work() -> None:
        windows = Windows(None)
        for number in range(10):
            await windows.ask(f"w{number}", due=1000.0)
        assert len(windows.inside) == 10

    run(work)


def test_a_stream_alone_is_never_held_back() -> None:
    async def work() -> None:
        windows = Windows(1.0)
        for number in range(10):
            await windows.ask(f"w{number}", due=100.0 + number)
            assert windows.inside[-1] == f"w{number}"
            windows.gate.leave()
        assert windows.gate.num_inside == 0

    run(work)


def test_streams_beyond_the_cap_fill_gaps_in_the_order_of_their_deadlines() -> None:
    async def work() -> None:
        windows = Windows(1.0)
        await windows.ask("urgent", due=0.0)
        await windows.ask("soon", due=0.5)
        for due in (9.0, 7.0, 8.0):
            await windows.ask(f"at {due:g}", due)
        assert windows.inside == ["urgent", "soon"]
        for _ in range(3):
            windows.gate.leave()
            await settle()
        assert windows.inside == ["urgent", "soon", "at 7", "at 8", "at 9"]
        assert windows.gate.num_inside == 2

    run(work)


def test_urgent_windows_pass_those_that_wait() -> None:
    async def work() -> None:
        windows = Windows(1.0)
        for due in (10.0, 11.0, 12.0):
            await windows.ask(f"at {due:g}", due)
        await windows.ask("new stream", due=0.0)
        assert windows.inside == ["at 10", "at 11", "new stream"]
        assert (windows.gate.num_inside, windows.gate.num_waiting) == (3, 1)

    run(work)


def test_time_makes_a_waiting_window_due() -> None:
    async def work() -> None:
        windows = Windows(1.0)
        for name in ("a", "b"):
            await windows.ask(name, due=0.0)
        await windows.ask("ahead", due=5.0)
        await asyncio.sleep(3.9)
        assert windows.inside == ["a", "b"]
        await asyncio.sleep(0.2)
        assert windows.inside == ["a", "b", "ahead"]
        assert windows.gate.num_inside == 3

    run(work)


def test_a_cancelled_window_leaves_no_trace() -> None:
    async def work() -> None:
        windows = Windows(1.0)
        for name in ("a", "b"):
            await windows.ask(name, due=0.0)
        await windows.ask("cancelled while waiting", due=50.0)
        windows.tasks["cancelled while waiting"].cancel()
        windows.gate.leave()  # before the cancelled task has noticed
        await settle()
        assert windows.gate.num_inside == 1

        await windows.ask("c", due=0.0)
        await windows.ask("cancelled when admitted", due=50.0)
        windows.gate.leave()
        windows.tasks["cancelled when admitted"].cancel()
        await settle()
        assert windows.inside == ["a", "b", "c"]
        assert windows.gate.num_inside == 1

        await asyncio.sleep(100.0)  # no timer is left to admit them
        assert windows.gate.num_inside == 1

    run(work)


def test_a_window_that_is_due_and_admitted_in_the_same_moment_counts_once() -> None:
    async def work() -> None:
        windows = Windows(1.0)
        for name in ("a", "b"):
            await windows.ask(name, due=0.0)
        await windows.ask("ahead", due=5.0)
        asyncio.get_running_loop().call_later(4.0, windows.gate.leave)
        await asyncio.sleep(10.0)
        assert windows.inside == ["a", "b", "ahead"]
        assert windows.gate.num_inside == 2

    run(work)
