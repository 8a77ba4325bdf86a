"""A checkpoint without weights is served with random ones."""

import asyncio
from pathlib import Path

import numpy as np

from omni_server.offline import collect
from omni_server.omni import AsyncOmni
from omni_server.types import ChatMessage, SamplingConfig, TextPart
from tests.checkpoints.write import make_demo_checkpoint
from tests.integration.live import demo_config, spoken

SAMPLES_PER_CODE = 480


async def test_a_folder_without_weights_starts_and_speaks_with_load_format_dummy(tmp_path: Path) -> None:
    folder = make_demo_checkpoint(tmp_path / "checkpoint", weights="dummy")
    lines: list[str] = []
    omni = await AsyncOmni.start(folder, demo_config(), load_format="dummy", on_progress=lines.append)
    try:
        for stage in ("thinker", "talker", "code2wav"):
            steps = [line.partition(" after ")[0] for line in lines if line.startswith(f"{stage}: ")]
            assert steps == [
                f"{stage}: starting",
                f"{stage}: loading weights",
                f"{stage}: weights loaded",
                f"{stage}: ready",
            ]
        answer = await collect(
            omni,
            spoken(
                (ChatMessage("user", (TextPart("Hello"),)),),
                # Such weights end a reply by chance, so its length is fixed in both stages.
                thinker=SamplingConfig(temperature=1.0, seed=5, ignore_eos=True, max_tokens=8, min_tokens=8),
                talker=SamplingConfig(temperature=1.0, seed=5, ignore_eos=True, max_tokens=30, min_tokens=30),
            ),
        )
        assert len(answer.token_ids) == 8
        assert len(answer.codes) == 30
        assert answer.audio.shape == (30 * SAMPLES_PER_CODE,)
        assert np.isfinite(answer.audio).all()
        async with asyncio.timeout(60):  # a worker hears of a request's end with the step after it
            while any((await omni.worker_count("num_row_requests")).values()):
                pass
    finally:
        await omni.stop()
