"""Results that tests make up."""

from benchmarks.serving.load import Progress
from benchmarks.serving.results import Host, Level, RequestRow, Run, Server
from benchmarks.serving.workload import WORKLOADS, Workload


def row(
    index: int = 0,
    *,
    sent_s: float = 0.0,
    ttfa_s: float | None = 0.5,
    ttft_s: float | None = 0.1,
    end_to_end_s: float = 2.0,
    samples: int = 120_000,
    underrun_s: float = 0.0,
    failure: str | None = None,
) -> RequestRow:
    return RequestRow(
        index=index,
        sent_s=sent_s,
        failure=failure,
        ttft_s=ttft_s,
        ttfa_s=ttfa_s,
        end_to_end_s=end_to_end_s,
        text_deltas=64,
        audio_gaps_s=[0.25, 0.75],
        samples=samples,
        underrun_s=underrun_s,
        stalls=0,
        finish_reason="length",
        prompt_tokens=60,
        cached_tokens=0,
        text_tokens=64,
        codec_tokens=250,
    )


def level(load: float, rows: list[RequestRow], *, client_cpu_s: float = 0.01) -> Level:
    progress = Progress(len(rows), rows, peak_in_flight=int(load))
    return progress.level("closed", load).model_copy(update={"client_cpu_s": client_cpu_s})


def run(*levels: Level, workload: Workload = WORKLOADS["W1"]) -> Run:
    return Run(
        date="2026-01-02T03:04:05+00:00",
        command="bench_serving --workload W1",
        host=Host(cpu="A CPU", cores=2, gpus=[], python="3.12.0", aiohttp="3.14.0"),
        server=Server(adapter="omni-server", base_url="http://127.0.0.1:8091", model="demo", version="0.1.0"),
        workload=workload,
        seed=1,
        levels=list(levels),
    )
