"""A real thinker engine pauses while a real code2wav engine computes first windows, and goes on.

On a CPU the launcher lets no stage give way, so the two engines are told here what it tells them on a GPU.
"""

import asyncio
import itertools
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input

from omni_server.config.stages import ArStage, DiffusionStage
from omni_server.engine.async_engine import StageAsyncLLM
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_args import ar_engine_args, diffusion_engine_args
from omni_server.family import load_family
from omni_server.protocol.give_way import BatchNotice, GiveWaySpec, encode_notice
from omni_server.protocol.local_socket import new_socket_name, socket_address
from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.qwen2_5_omni.codec_window import CodecWindow, encode_codec_window
from tests.integration.engines import CPU_ENVIRONMENT, ar_engine, diffusion_engine
from tests.integration.live import demo_config

DEADLINE_S = 60.0
PROMPT = list(range(10, 30))
NUM_TOKENS = 60


@dataclass
class Pair:
    """A thinker that gives way and the code2wav to which it does."""

    thinker: StageAsyncLLM
    code2wav: DiffusionHandle
    spec: GiveWaySpec
    ids: "itertools.count[int]"

    async def text(self) -> list[int]:
        """The same greedy tokens at each call."""
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        async for output in self.thinker.generate(tokens_input(PROMPT), params, f"text-{next(self.ids)}"):
            token_ids = list(output.outputs[0].token_ids)
        return token_ids

    async def window(self, *, is_first: bool) -> None:
        """Have one computed."""
        start, end = (0, 24) if is_first else (24, 36)
        window = CodecWindow("Chelsie", 0, 0, start, end, 20, True)
        codes = tuple(np.random.default_rng(0).integers(0, 8192, end).tolist())
        samples = await self.code2wav.run(f"window-{next(self.ids)}", codes, encode_codec_window(window))
        assert len(samples) == 480 * (end - start)

    async def pauses(self) -> int:
        ((number, seconds),) = await self.thinker.collective_rpc("pauses")
        assert (seconds > 0) == (number > 0)
        return int(number)

    @asynccontextmanager
    async def texts(self, check: Callable[[list[int]], None]) -> AsyncIterator[None]:
        """The thinker writes one text after the other while this is entered; each is given to `check`."""
        is_enough = False

        async def write() -> None:
            while not is_enough:
                check(await self.text())

        writing = asyncio.create_task(write())
        try:
            yield
        finally:
            is_enough = True
            await asyncio.wait_for(writing, DEADLINE_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(checkpoint: Path) -> AsyncIterator[Pair]:
    with pytest.MonkeyPatch.context() as environment, tempfile.TemporaryDirectory(prefix="t-") as folder:
        for name, value in CPU_ENVIRONMENT.items():
            environment.setenv(name, value)
        config = demo_config()
        family = load_family(config.model_family)
        family.register()
        thinker_stage, code2wav_stage = config.stages["thinker"], config.stages["code2wav"]
        assert isinstance(thinker_stage, ArStage)
        assert isinstance(code2wav_stage, DiffusionStage)
        overrides = family.hf_overrides("code2wav")
        assert overrides is not None
        spec = GiveWaySpec(new_socket_name())
        thinker_arguments = ar_engine_args(
            checkpoint,
            thinker_stage,
            StageRuntimeConfig(str(checkpoint), gives_way=spec),
            platform="cpu",
            load_format="auto",
            hf_overrides=family.hf_overrides("thinker"),
        )
        code2wav_arguments = diffusion_engine_args(
            checkpoint,
            code2wav_stage,
            platform="cpu",
            load_format="auto",
            hf_overrides=overrides,
            carries_state=False,
            announces_to=(spec,),
        )
        thinker = await ar_engine("thinker", thinker_arguments, Path(folder))
        code2wav = await diffusion_engine("code2wav", code2wav_arguments, Path(folder))
        try:
            yield Pair(thinker.engine, code2wav, spec, itertools.count())
        finally:
            await code2wav.shutdown()
            await thinker.shutdown()


@pytest.mark.asyncio(loop_scope="module")
async def test_text_without_speech_is_never_paused(pair: Pair) -> None:
    before = await pair.pauses()
    assert len(await pair.text()) == NUM_TOKENS
    assert await pair.pauses() == before


@pytest.mark.asyncio(loop_scope="module")
async def test_the_thinker_pauses_for_first_windows_and_writes_the_same(pair: Pair) -> None:
    expected = await pair.text()
    texts: list[list[int]] = []
    before = await pair.pauses()
    async with asyncio.timeout(DEADLINE_S), pair.texts(texts.append):
        while await pair.pauses() < before + 3 or len(texts) < 3:
            await pair.window(is_first=True)
    assert all(text == expected for text in texts)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_thinker_goes_on_beside_later_windows(pair: Pair) -> None:
    texts: list[list[int]] = []
    before = await pair.pauses()
    async with asyncio.timeout(DEADLINE_S), pair.texts(texts.append):
        while len(texts) < 3:
            await pair.window(is_first=False)
    assert await pair.pauses() == before


@pytest.mark.asyncio(loop_scope="module")
async def test_a_window_whose_end_is_never_told_costs_one_pause(pair: Pair) -> None:
    expected = await pair.text()
    before = await pair.pauses()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        # From the future: it must not be too old when a slow machine comes to the thinker's next step.
        sent_at = time.monotonic() + DEADLINE_S
        message = encode_notice(BatchNotice(is_running=True, is_urgent=True, num_streams=1, sent_at=sent_at))
        sender.sendto(message, socket_address(pair.spec.socket))
    assert await asyncio.wait_for(pair.text(), DEADLINE_S) == expected
    assert await pair.pauses() == before + 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_code2wav_that_is_gone_leaves_the_thinker_to_itself(pair: Pair) -> None:
    """The last test: there is no speech after it."""
    expected = await pair.text()
    async with pair.texts(lambda text: None):
        windows = [asyncio.create_task(pair.window(is_first=True)) for _ in range(4)]
        await pair.code2wav.shutdown()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*windows, return_exceptions=True)
    assert await asyncio.wait_for(pair.text(), DEADLINE_S) == expected
