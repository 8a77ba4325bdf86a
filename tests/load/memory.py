"""Memory of the server's processes over time."""

import time
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from tests.faults.supervised_server import SupervisedServer

MIB = 2**20
SETTLED_S = 90.0
"""A process that is younger is still filling its caches and its allocator."""
NUM_PARTS = 5
"""Of a life, of which the first is compared with the last."""


@dataclass
class Life:
    """One process, of the server or of a stage's replica."""

    role: str
    pid: int
    began: float
    """Of `time.monotonic`."""
    seconds: list[float] = field(default_factory=list)
    """Since the beginning of the run."""
    rss: list[int] = field(default_factory=list)
    """Bytes, at each of these times."""
    threads: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def since(self, seconds: float) -> "Life":
        """What was seen of it from then on."""
        seen = slice(bisect_left(self.seconds, seconds), None)
        return replace(
            self,
            seconds=self.seconds[seen],
            rss=self.rss[seen],
            threads=self.threads[seen],
            descriptors=self.descriptors[seen],
        )

    def medians(self) -> list[float]:
        """Of each fifth of the samples, in order; of fewer where there are fewer samples."""
        count = min(NUM_PARTS, len(self.rss))
        bounds = [number * len(self.rss) // count for number in range(count + 1)]
        return [median(self.rss[begin:end]) for begin, end in pairwise(bounds)]

    def growth_bytes(self) -> float:
        """From the median of the first fifth of the samples to that of the last."""
        medians = self.medians()
        return medians[-1] - medians[0]

    def slope_bytes_per_h(self) -> float:
        """Median of the slopes between all pairs of samples (Theil and Sen): single outliers do not move
        it."""
        points = list(zip(self.seconds, self.rss, strict=True))
        slopes = [
            (later - sooner) / (end - begin)
            for number, (begin, sooner) in enumerate(points)
            for end, later in points[number + 1 :]
        ]
        return 3600 * median(slopes) if slopes else 0.0


class MemoryWatch:
    """Takes a sample of each process when asked; processes that are not settled are left out."""

    def __init__(self, server: SupervisedServer, settled_s: float = SETTLED_S) -> None:
        self._server = server
        self._settled_s = settled_s
        self._began = time.monotonic()
        self.lives: dict[int, Life] = {}

    def sample(self) -> None:
        server, now = self._server, time.monotonic()
        for role, pid in [
            ("server", server.process.pid),
            *((engine, server.pid_of(engine)) for engine in server.engines),
        ]:
            life = self.lives.setdefault(pid, Life(role, pid, now))
            if now - life.began < self._settled_s:
                continue
            try:
                process = Path(f"/proc/{pid}")
                fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
                descriptors = len(list((process / "fd").iterdir()))
            except OSError:  # killed; the log tells its successor soon
                continue
            if "VmRSS" not in fields:
                continue  # killed, and not waited for yet
            life.seconds.append(now - self._began)
            life.rss.append(1024 * int(fields["VmRSS"].split()[0]))
            life.threads.append(int(fields["Threads"]))
            life.descriptors.append(descriptors)
