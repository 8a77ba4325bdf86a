"""The results of a run, as in the JSON file. Times are in seconds."""

import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import aiohttp
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from benchmarks.servers import nvidia_smi
from benchmarks.serving.client import SAMPLE_RATE_HZ
from benchmarks.serving.workload import Workload
from omni_server.errors import ConfigError

LoadKind = Literal["closed", "open"]


def level_label(kind: LoadKind, load: float) -> str:
    return f"c={load:g}" if kind == "closed" else f"{load:g}/s"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestRow(_Record):
    """One request. Times count from its sending, except `sent_s`."""

    index: int
    sent_s: float
    """Since the load level began."""
    failure: str | None
    """Why the request does not count; the row holds the measurements until then."""
    end_to_end_s: float
    """To the last byte."""
    ttft_s: float | None = None
    """To the first non-empty text; None if there was none."""
    ttfa_s: float | None = None
    """To the first non-empty audio."""
    text_deltas: int = 0
    audio_gaps_s: list[float] = []
    """Between consecutive arrivals of audio."""
    samples: int = 0
    underrun_s: float = 0.0
    stalls: int = 0
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    text_tokens: int | None = None
    codec_tokens: int | None = None
    preview_s: float | None = None
    """To the first partial image."""
    previews: int = 0

    @property
    def audio_s(self) -> float:
        return self.samples / SAMPLE_RATE_HZ

    @property
    def rtf(self) -> float | None:
        """Real-time factor: end-to-end time divided by audio duration."""
        return self.end_to_end_s / self.audio_s if self.samples else None

    @property
    def plays_without_stall(self) -> bool:
        """Whether playback that starts with the first byte never waits for audio."""
        return self.failure is None and self.samples > 0 and not self.stalls

    @property
    def largest_gap_s(self) -> float | None:
        return max(self.audio_gaps_s, default=None)


class Percentiles(_Record):
    p50: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Percentiles | None":
        """Interpolates between neighbours (numpy's `linear`): with few values, p99 is close to the largest
        one. Returns None if no value is known."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        p50, p90, p99 = np.percentile(known, (50, 90, 99), method="linear").tolist()
        return cls(p50=p50, p90=p90, p99=p99, count=len(known))


class Level(_Record):
    """One load level. "closed": `load` clients, each of which sends its next request when the last is
    answered. "open": requests arrive at random, `load` per second, however many are in flight.

    Percentiles, tokens and audio cover only the requests that did not fail.
    """

    kind: LoadKind
    load: float
    interrupted: bool
    unfinished: int
    """Requests in flight when the run was interrupted; they have no rows."""
    wall_s: float
    """From the first send to the last byte."""
    peak_in_flight: int
    client_cpu_s: float
    """CPU time of the load generator itself."""
    rows: list[RequestRow]
    ttft_s: Percentiles | None
    ttfa_s: Percentiles | None
    rtf: Percentiles | None
    largest_gap_s: Percentiles | None
    underrun_s: Percentiles | None
    end_to_end_s: Percentiles | None
    preview_s: Percentiles | None = None
    prompt_tokens: Percentiles | None
    cached_tokens: Percentiles | None
    audio_s_per_s: float
    requests_per_s: float
    """Also images per second: each request asks for one."""
    text_tokens_per_s: float

    @property
    def label(self) -> str:
        return level_label(self.kind, self.load)

    @property
    def failures(self) -> list[str]:
        return [row.failure for row in self.rows if row.failure is not None]

    @property
    def continuous_playback(self) -> str:
        number, total = sum(row.plays_without_stall for row in self.rows), len(self.rows)
        return f"{'pass' if number == total else 'FAIL'}, {number} of {total}"

    @property
    def client_cores(self) -> float:
        """Number of cores that the load generator kept busy."""
        return self.client_cpu_s / self.wall_s if self.wall_s > 0 else 0.0


class Host(_Record):
    """The machine on which the load generator runs."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    gpus: list[str]
    """As nvidia-smi lists them; empty if it fails."""
    python: str
    aiohttp: str

    @classmethod
    def this_machine(cls) -> "Host":
        model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return cls(
            cpu=model[1] if model is not None else platform.machine(),
            cores=len(os.sched_getaffinity(0)),
            gpus=nvidia_smi("name,memory.total,driver_version"),
            python=platform.python_version(),
            aiohttp=aiohttp.__version__,
        )


class Server(_Record):
    adapter: str
    base_url: str
    model: str
    version: str | None
    """The answer to `GET /version`, if any."""


class Run(_Record):
    format: Literal[1] = 1
    date: str
    """UTC, ISO 8601."""
    command: str
    host: Host
    server: Server
    workload: Workload
    temperature: float = 0.0
    seed: int
    levels: list[Level]


def load_run(file: Path) -> Run:
    """Raises `ConfigError` if `file` does not hold an earlier run."""
    try:
        return Run.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{file}: not the results of a benchmark: {error}") from error
