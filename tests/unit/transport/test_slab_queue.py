"""The shared-memory queue, on files of its own in shared memory."""

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omni_server.errors import ConfigError
from omni_server.protocol.rows import SharedBlock
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SHARED_MEMORY_DIR, SlabQueue, new_queue_path, sweep_dead_queues

REPOSITORY = Path(__file__).resolve().parents[3]

MakeQueue = Callable[..., SlabQueue]


@pytest.fixture
def make() -> Iterator[MakeQueue]:
    made: list[SlabQueue] = []

    def make_queue(
        *, capacity: int = 2, slot_bytes: int = 100, max_portions: int = 3, num_consumers: int = 1
    ) -> SlabQueue:
        path = str(new_queue_path("test"))
        spec = QueueSpec(capacity, path, slot_bytes, max_portions, num_consumers)
        queue = SlabQueue(spec, create=True)
        made.append(queue)
        return queue

    yield make_queue
    for queue in made:
        if queue.path.exists():
            queue.close()


def filled(queue: SlabQueue, num_portions: int) -> list[SharedBlock]:
    """One step through the producer; references to its portions."""
    taken = queue.take()
    assert taken is not None
    slot, generation = taken
    queue.publish(slot, generation, num_portions)
    return [SharedBlock(slot, generation, portion) for portion in range(num_portions)]


def test_machines_that_may_reorder_stores_are_refused(
    make: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match=r"this machine is aarch64: set queue\.transport to inline"):
        make()


def test_a_taken_slot_is_not_free_before_it_is_published(make: MakeQueue) -> None:
    queue = make(capacity=1)
    assert queue.take() is not None
    assert queue.take() is None
    assert queue.num_in_use() == 0  # nobody holds a reference to it yet


def test_a_slot_is_free_again_when_all_its_portions_have_ended(make: MakeQueue) -> None:
    queue = make(capacity=1)
    blocks = filled(queue, 3)
    for block in blocks[:-1]:
        queue.finish(block, 0)
        assert queue.num_free() == 0
        assert queue.num_in_use() == 1
    queue.finish(blocks[-1], 0)
    assert queue.num_free() == 1
    assert queue.num_in_use() == 0


def test_dropping_a_portion_ends_it_for_all_consumers(make: MakeQueue) -> None:
    queue = make(capacity=1, num_consumers=2)
    first, second = filled(queue, 2)
    queue.finish_all(first)
    assert queue.num_free() == 0
    queue.finish(second, 0)
    queue.finish(second, 1)
    assert queue.num_free() == 1


def test_each_use_of_a_slot_has_a_generation_of_its_own(make: MakeQueue) -> None:
    queue = make(capacity=1)
    generations = set()
    for _ in range(5):
        (block,) = filled(queue, 1)
        generations.add(block.generation)
        assert queue.num_free() == 0, "marks of the slot's earlier use count for the new one"
        queue.finish(block, 0)
    assert len(generations) == 5
    assert queue.num_published() == 5


def test_the_generation_wraps_around_and_skips_the_mark_of_an_unused_slot(make: MakeQueue) -> None:
    queue = make(capacity=1)
    queue._taken[0] = 0xFFFFFFFF
    queue.publish(0, 0xFFFFFFFF, 0)
    assert queue.take() == (0, 1)
    assert queue.take() is None


def test_a_reference_to_an_earlier_use_is_recognised(make: MakeQueue) -> None:
    queue = make(capacity=1)
    (stale,) = filled(queue, 1)
    queue.finish(stale, 0)
    (current,) = filled(queue, 1)
    queue.check(current)
    with pytest.raises(ValueError, match="stale reference to slot 0"):
        queue.check(stale)


def test_ending_a_stale_reference_does_not_free_the_slots_current_use(make: MakeQueue) -> None:
    queue = make(capacity=1)
    (stale,) = filled(queue, 1)
    queue.finish(stale, 0)
    filled(queue, 1)
    queue.finish_all(stale)
    assert queue.num_free() == 0


def test_more_portions_than_there_is_room_for_are_refused(make: MakeQueue) -> None:
    queue = make(max_portions=2)
    taken = queue.take()
    assert taken is not None
    with pytest.raises(ValueError, match="3 portions"):
        queue.publish(*taken, 3)


def test_slots_do_not_overlap_each_other_or_the_flags(make: MakeQueue) -> None:
    queue = make(capacity=3, slot_bytes=5000, max_portions=7)
    blocks = filled(queue, 7)
    for slot in range(3):
        queue.slot_buffer(slot)[:] = bytes([slot + 1]) * queue.slot_bytes
    for slot in range(3):
        assert bytes(queue.slot_buffer(slot)) == bytes([slot + 1]) * queue.slot_bytes
    assert queue.num_in_use() == 1
    for block in blocks:
        queue.finish(block, 0)
    assert queue.num_free() == 3


def test_closing_while_somebody_views_a_slot_removes_the_file_too(make: MakeQueue) -> None:
    queue = make()
    view = queue.slot_buffer(0)
    queue.close()
    assert not queue.path.exists()
    view[:2] = b"ok"  # the memory lives as long as the view
    assert bytes(view[:2]) == b"ok"


def test_only_its_user_may_read_the_file(make: MakeQueue) -> None:
    assert make().path.stat().st_mode & 0o777 == 0o600


def test_a_sweep_removes_the_file_of_a_killed_owner() -> None:
    program = (
        "import sys, time\n"
        "from omni_server.transport.slab_queue import SlabQueue, new_queue_path\n"
        "from omni_server.protocol.runtime_config import QueueSpec\n"
        "queue = SlabQueue(QueueSpec(1, str(new_queue_path('orphan')), 10, 1, 1), create=True)\n"
        "print(queue.path, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    try:
        path = Path(owner.stdout.readline().strip())
        assert path.exists()
        assert path not in sweep_dead_queues()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert path.exists(), "nobody could remove it"
        assert path in sweep_dead_queues()
        assert not path.exists()
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


def test_more_than_there_is_shared_memory_is_refused_and_leaves_nothing() -> None:
    free = os.statvfs(SHARED_MEMORY_DIR)
    path = new_queue_path("too-large")
    with pytest.raises(ConfigError, match=r"--shm-size.*lower queue\.capacity"):
        SlabQueue(QueueSpec(1, str(path), 2 * free.f_blocks * free.f_frsize, 1, 1), create=True)
    assert not path.exists()
