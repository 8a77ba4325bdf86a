"""Memory that is freed goes back to the system, in a process of its own: the setting is the process's."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

CODE = """
from pathlib import Path
from omni_server.cli.freed_memory import give_freed_memory_back

def resident_mib():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) // 1024

give_freed_memory_back()
bytearray(b"x") * (31 << 20)  # freed at once: from now on glibc would take what is smaller from its heap
before = resident_mib()
blocks = [bytearray(b"x") * (20 << 20) for _ in range(5)]
behind = bytearray(b"x") * 200_000  # the heap cannot shrink below it
held = resident_mib() - before
blocks.clear()
print(held, resident_mib() - before)
"""


def test_large_blocks_are_given_back_when_they_are_freed() -> None:
    process = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    held, kept = map(int, process.stdout.split())
    assert held >= 100
    assert kept < 10
