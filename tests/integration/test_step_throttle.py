"""A real thinker engine is throttled while a real code2wav engine computes, and goes on.

On a CPU the launcher throttles no stage, so the two engines are told here what it tells them on a GPU.
"""

import asyncio
import contextlib
import itertools
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
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
from omni_server.protocol.local_socket import bound_socket, new_socket_name, socket_address
from omni_server.protocol.runtime_config import StageRuntimeConfig, StepThrottleSpec
from stages.qwen2_5_omni.codec_window import CodecWindow
from stages.runtime.step_throttle import BatchNotice
from tests.integration.engines import CPU_ENVIRONMENT, ar_engine, diffusion_engine
from tests.integration.live import demo_config

DEADLINE_S = 60.0
PROMPT = list(range(10, 30))
NUM_TOKENS = 60
NUM_STREAMS = 8
INTERVAL_S = 0.016


@dataclass
class Pair:
    """A thinker that is throttled and the code2wav that it hears."""

    thinker: StageAsyncLLM
    code2wav: DiffusionHandle
    spec: StepThrottleSpec
    listener: socket.socket
    """Hears of the same batches."""
    ids: "itertools.count[int]"

    async def text(self) -> list[int]:
        """The same greedy tokens at each call."""
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        async for output in self.thinker.generate(tokens_input(PROMPT), params, f"text-{next(self.ids)}"):
            token_ids = list(output.outputs[0].token_ids)
        return token_ids

    async def window(self) -> None:
        """Have one computed."""
        window = CodecWindow("Chelsie", 0, 0, 0, 24, 20, True)
        codes = tuple(np.random.default_rng(0).integers(0, 8192, 24).tolist())
        samples = await self.code2wav.run(
            f"window-{next(self.ids)}", codes, window.encode(), num_streams=NUM_STREAMS
        )
        assert len(samples) == 480 * 24

    def tell(self, *, is_running: bool, sent_at: float) -> None:
        """The thinker of a batch, as code2wav would."""
        notice = BatchNotice(is_running=is_running, num_streams=NUM_STREAMS, sent_at=sent_at)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(msgspec.json.encode(notice), socket_address(self.spec.socket))

    def heard(self) -> list[BatchNotice]:
        notices = []
        with contextlib.suppress(BlockingIOError):
            while True:
                notices.append(msgspec.json.decode(self.listener.recv(256), type=BatchNotice))
        return notices

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
        spec = StepThrottleSpec(new_socket_name(), INTERVAL_S / NUM_STREAMS, max_streams=16)
        listener = bound_socket(own_name := new_socket_name())
        listener.setblocking(False)
        thinker_arguments = ar_engine_args(
            checkpoint,
            thinker_stage,
            StageRuntimeConfig(str(checkpoint), step_throttle=spec),
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
            announces_to=(spec.socket, own_name),
        )
        thinker = await ar_engine("thinker", thinker_arguments, Path(folder))
        code2wav = await diffusion_engine("code2wav", code2wav_arguments, Path(folder))
        try:
            yield Pair(thinker.engine, code2wav, spec, listener, itertools.count())
        finally:
            await code2wav.shutdown()
            await thinker.shutdown()
            listener.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_thinker_writes_the_same_beside_code2wav(pair: Pair) -> None:
    expected = await pair.text()
    texts: list[list[int]] = []
    async with asyncio.timeout(DEADLINE_S), pair.texts(texts.append):
        while len(texts) < 3:
            await pair.window()
    assert all(text == expected for text in texts)
    notices = pair.heard()
    assert {(notice.is_running, notice.num_streams) for notice in notices} == {
        (is_running, NUM_STREAMS) for is_running in (True, False)
    }


@pytest.mark.asyncio(loop_scope="module")
async def test_steps_keep_their_interval_until_the_batch_has_ended(pair: Pair) -> None:
    expected = await pair.text()
    # From the future: it must not be too old when a slow machine comes to the thinker's last step.
    pair.tell(is_running=True, sent_at=time.monotonic() + DEADLINE_S)
    began = time.monotonic()
    assert await asyncio.wait_for(pair.text(), DEADLINE_S) == expected
    assert time.monotonic() - began >= (NUM_TOKENS - 1) * INTERVAL_S
    pair.tell(is_running=False, sent_at=time.monotonic())


@pytest.mark.asyncio(loop_scope="module")
async def test_a_code2wav_that_is_gone_leaves_the_thinker_to_itself(pair: Pair) -> None:
    """The last test: there is no speech after it."""
    expected = await pair.text()
    async with pair.texts(lambda text: None):
        windows = [asyncio.create_task(pair.window()) for _ in range(4)]
        await pair.code2wav.shutdown()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*windows, return_exceptions=True)
    assert await asyncio.wait_for(pair.text(), DEADLINE_S) == expected
