"""vLLM sends media to an engine once and refers to them from then on: that must survive requests that never ran."""

import asyncio

import pytest

from omni_server.errors import InvalidRequestError
from omni_server.types import SamplingConfig
from tests.integration.live import LiveOmni, written
from tests.reference.cases import CASES


def test_a_refused_request_does_not_spoil_the_next_with_the_same_picture(whole: LiveOmni) -> None:
    messages = CASES["image"].messages
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        whole.answer(written(messages, thinker=SamplingConfig(max_tokens=10**6)))
    assert whole.answer(written(messages)).token_ids


def test_a_client_that_leaves_during_admission_does_not_spoil_the_next_request(whole: LiveOmni) -> None:
    messages = CASES["video"].messages

    async def leave() -> None:
        submitting = asyncio.create_task(whole.omni.submit(written(messages)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        submitting.cancel()
        await asyncio.wait([submitting])
        assert submitting.cancelled()

    whole.run(leave())
    assert whole.answer(written(messages)).token_ids


def test_a_client_that_leaves_right_after_admission_does_not_either(whole: LiveOmni) -> None:
    messages = CASES["speech"].messages

    async def leave() -> None:
        await (await whole.omni.submit(written(messages))).aclose()

    whole.run(leave())
    assert whole.answer(written(messages)).token_ids
