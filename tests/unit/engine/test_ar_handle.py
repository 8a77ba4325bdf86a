"""Opening a request of an autoregressive stage, and what remains if that does not succeed."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.multimodal.inputs import PlaceholderRange
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.params import TokenizeParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.ar_stream import ArOutput
from omni_server.engine.async_engine import RowSink, StageAsyncLLM
from omni_server.engine.construction import BuiltEngine
from omni_server.engine.engine_processes import EngineProcesses
from omni_server.engine.start_progress import StartProgress
from omni_server.errors import (
    CorruptDataError,
    InvalidRequestError,
    OmniError,
    OverloadedError,
    StageError,
)
from omni_server.metrics.stage_metrics import ArStageMetrics
from omni_server.protocol.corruption import Corruption, encode_corruption
from omni_server.protocol.rows import AddressedFeed, RowsFeed
from omni_server.protocol.vllm_fields import (
    GRAMMAR_ALLOWS_NOTHING,
    GRAMMAR_TOO_SLOW,
    GRAMMARS_BUSY,
)
from omni_server.types import Prompt


class FakeTokenizer:
    """Token 8 is special; others are words, and those from 128 on single bytes."""

    all_special_ids = (8,)
    max_chars_per_token = 7

    def get_added_vocab(self) -> dict[str, int]:
        return {"<|end|>": 8}

    def get_vocab(self) -> dict[str, int]:
        return self.get_added_vocab()

    def convert_ids_to_tokens(self, ids: int | list[int]) -> str | list[str]:
        return f"w{ids}" if isinstance(ids, int) else [f"w{token_id}" for token_id in ids]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        texts = {8: b"" if skip_special_tokens else b"<|end|>"}
        texts |= {i: bytes([i]) if i >= 128 else f"w{i}".encode() for i in token_ids if i != 8}
        return b"".join(texts[i] for i in token_ids).decode(errors="replace")


class FakeEngine:
    """Stands for `StageAsyncLLM`: a request is with the engine before `add_request` returns."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 256)
        self.vllm_config = SimpleNamespace(
            model_config=None, speculative_config=None, structured_outputs_config=None
        )
        self.row_sinks: dict[str, RowSink] = {}
        self.errored = False
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: dict[str, SamplingParams] = {}
        self.output_processor = SimpleNamespace(
            stage_metrics=ArStageMetrics(),
            row_ledger=None,
            request_states={},
            row_sinks=self.row_sinks,
            take_codes=lambda *_: None,
            drop_codes=lambda _: None,
        )
        self.renderer: FakeRenderer | None = None
        self.input_processor = SimpleNamespace(mm_encoder_cache_size=50)

    async def add_request(
        self, request_id: str, engine_input: object, params: SamplingParams, *, priority: int
    ) -> RequestOutputCollector:
        if self.error is not None:
            raise self.error
        self.requests[request_id] = params
        await self.gate.wait()
        self.queue = RequestOutputCollector(RequestOutputKind.DELTA, f"{request_id}-internal")
        return self.queue

    fail = StageAsyncLLM.fail

    async def abort(self, request_id: str, *, internal: bool) -> None:
        self.requests.pop(request_id.removesuffix("-internal") if internal else request_id, None)

    def get_tokenizer(self) -> "FakeTokenizer":
        return FakeTokenizer()

    async def send_feeds(self, feeds: list[AddressedFeed]) -> None:
        if self.error is not None:
            raise self.error


class Refused(SamplingParams):
    """What vLLM refuses in words of the request."""

    def verify(self, *_: object) -> None:
        cause = ValueError("[12:34:56] /src/grammar.cc:1: rule\x1b[31m\u2028is cyclic\n")
        raise VLLMValidationError("no grammar:\r\n1970-01-01 INFO forged") from cause


async def never_built(progress: StartProgress) -> BuiltEngine:
    raise AssertionError("the engine is given")


def handle_of(engine: FakeEngine) -> ArHandle:
    built = BuiltEngine(cast(StageAsyncLLM, engine), cast(EngineProcesses, None))
    handle = ArHandle("talker", never_built)
    handle.attach(built)
    return handle


class FakeRenderer:
    """A token for each character."""

    default_cmpl_tok_params = TokenizeParams(max_total_tokens=64)

    def __init__(self) -> None:
        self.tokenised: list[str] = []

    def tokenize_prompt(self, prompt: dict[str, str], params: TokenizeParams) -> dict[str, list[int]]:
        self.tokenised.append(prompt["prompt"])
        start = [0] if params.add_special_tokens else []
        return {"prompt_token_ids": start + [ord(character) for character in prompt["prompt"]]}

    async def tokenize_prompt_async(
        self, prompt: dict[str, str], params: TokenizeParams
    ) -> dict[str, list[int]]:
        return self.tokenize_prompt(prompt, params)

    def render_cmpl(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return list(prompts)

    async def render_cmpl_async(
        self, prompts: list[dict[str, Any]], *, skip_mm_cache: bool
    ) -> list[dict[str, Any]]:
        """A media item has as many tokens as samples."""
        (prompt,) = prompts
        lengths = [len(samples) for samples, _ in prompt["multi_modal_data"]["audio"]]
        places = [PlaceholderRange(offset=0, length=length) for length in lengths]
        return [prompt | {"mm_placeholders": {"audio": places}}]


def handle_that_renders(renderer: FakeRenderer | None = None) -> ArHandle:
    engine = FakeEngine()
    engine.renderer = FakeRenderer() if renderer is None else renderer
    return handle_of(engine)


async def test_media_with_more_tokens_than_the_encoder_takes_are_refused() -> None:
    audios = tuple((np.zeros(length, np.float32), 16_000) for length in (50, 51))
    with pytest.raises(InvalidRequestError) as error:
        await handle_that_renders().render(Prompt("a", audios=audios))
    assert (error.value.param, error.value.code, error.value.message) == (
        "messages",
        "media_too_large",
        "This server takes media of up to 50 tokens each, but the audio has 51.",
    )


@pytest.mark.parametrize(("num_pieces", "num_tokenised"), [(65, 0), (64, 32), (33, 32)])
async def test_pieces_that_do_not_fit_are_not_tokenised(num_pieces: int, num_tokenised: int) -> None:
    """Of two tokens each, and one before them, where 64 fit."""
    renderer = FakeRenderer()
    with pytest.raises(InvalidRequestError, match="maximum context length") as error:
        await handle_that_renders(renderer).render(Prompt("ab" * num_pieces, pieces=("ab",) * num_pieces))
    assert error.value.code == "context_length_exceeded"
    assert len(renderer.tokenised) == num_tokenised


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        (Prompt("ab"), (0, 97, 98)),
        (Prompt("ab", add_special_tokens=False), (97, 98)),
        (Prompt("ab", pieces=("a", "b"), add_special_tokens=False), (97, 98)),
        (Prompt(token_ids=(255, 8)), (255, 8)),
    ],
)
async def test_a_prompt_has_the_tokens_of_its_text_or_those_given(
    prompt: Prompt, token_ids: tuple[int, ...]
) -> None:
    assert (await handle_that_renders().render(prompt)).token_ids == token_ids


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (Prompt(token_ids=(1, 256)), "invalid_value"),
        (Prompt("x" * 63), "context_length_exceeded"),
        (Prompt(token_ids=(1,) * 64), "context_length_exceeded"),
    ],
)
async def test_a_prompt_with_too_many_or_unknown_tokens_is_refused(prompt: Prompt, code: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        await handle_that_renders().render(prompt)
    assert (error.value.param, error.value.code) == ("messages", code)


@pytest.mark.parametrize("prompt", [Prompt("ab" * 99), Prompt("ab" * 99, pieces=("ab",) * 99)])
async def test_text_that_is_only_tokenized_may_be_longer_than_the_context(prompt: Prompt) -> None:
    tokenized = await handle_that_renders().tokenize(prompt)
    assert tokenized.token_ids == (0, *map(ord, "ab" * 99))
    assert len(tokenized.strings) == 199


def test_more_text_than_all_tokens_of_a_context_can_spell_is_refused() -> None:
    handle = handle_of(FakeEngine())
    handle.check_text(64 * 7)
    with pytest.raises(InvalidRequestError) as error:
        handle.check_text(64 * 7 + 1)
    assert (error.value.param, error.value.code) == ("messages", "context_length_exceeded")


def drop(payload: object) -> None:
    """A row sink."""


async def test_a_request_that_is_cancelled_while_it_is_sent_does_not_run_on() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    opening = asyncio.create_task(handle_of(engine).open("a", (1,), SamplingParams(), drop))
    await asyncio.sleep(0)
    assert "a" in engine.requests
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert engine.requests == {}
    assert engine.row_sinks == {}


class Broken(SamplingParams):
    def verify(self, *_: object) -> None:
        raise ValueError("math domain error")


async def test_an_error_that_vllm_did_not_expect_is_not_the_callers_mistake() -> None:
    engine = FakeEngine()
    engine.error = ValueError("not enough values to unpack")
    with pytest.raises(ValueError, match="not enough values"):
        await handle_of(engine).open("a", (1,), SamplingParams(), drop)
    assert engine.row_sinks == {}
    with pytest.raises(ValueError, match="math domain"):
        await handle_of(FakeEngine()).check(Broken())


@pytest.mark.parametrize("error", [ValueError, TypeError])
async def test_a_renderer_that_fails_does_not_blame_the_prompt(error: type[Exception]) -> None:
    class Failing(FakeRenderer):
        def render_cmpl(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
            raise error("'NoneType' object is not subscriptable")

    with pytest.raises(error, match="NoneType"):
        await handle_that_renders(Failing()).render(Prompt("a"))


async def test_what_the_renderer_refuses_is_told_without_the_value() -> None:
    class Refusing(FakeRenderer):
        def render_cmpl(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
            raise VLLMValidationError("At most 2 images may be provided.", parameter="image", value=b"secret")

    with pytest.raises(InvalidRequestError) as caught:
        await handle_that_renders(Refusing()).render(Prompt("a"))
    assert caught.value.message == "The prompt cannot be processed: At most 2 images may be provided."


async def test_a_refusal_is_one_line_without_control_characters() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await handle_of(FakeEngine()).check(Refused(), "tools")
    assert caught.value.message == "no grammar:  1970-01-01 INFO forged rule [31m is cyclic"
    assert caught.value.param == "tools"


async def test_a_request_whose_rows_cannot_be_sent_fails_at_once() -> None:
    engine = FakeEngine()
    handle = handle_of(engine)
    stream = await handle.open("a", (1,), SamplingParams())
    engine.output_processor.request_states[stream.engine_id] = SimpleNamespace(queue=engine.queue)
    engine.error = ValueError("unforeseen")
    handle.outbox.put((stream.engine_id, RowsFeed(final_length=3)))
    handle.outbox.put(("one that has ended", RowsFeed(final_length=3)))
    with pytest.raises(StageError, match="its input could not be sent"):
        await asyncio.wait_for(anext(stream.outputs()), 10)
    await stream.close()
    assert engine.requests == {}


# -- outputs


def last_output(finish_reason: str, stop_reason: int | str | None) -> RequestOutput:
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=[7],
        cumulative_logprob=None,
        logprobs=None,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )
    return RequestOutput("a", None, [1, 2], None, [completion], finished=True)


async def outputs_of(output: RequestOutput) -> list[ArOutput]:
    engine = FakeEngine()
    stream = await handle_of(engine).open("a", (1, 2), SamplingParams())
    engine.queue.put(output)
    return [one async for one in stream.outputs()]


@pytest.mark.parametrize(
    ("stop_reason", "error"),
    [
        (GRAMMAR_TOO_SLOW, InvalidRequestError),
        (GRAMMAR_ALLOWS_NOTHING, InvalidRequestError),
        (GRAMMARS_BUSY, OverloadedError),
        (None, StageError),
    ],
)
async def test_why_the_engine_gave_a_request_up_decides_whose_fault_it_was(
    stop_reason: str | None, error: type[OmniError]
) -> None:
    with pytest.raises(error):
        await outputs_of(last_output("error", stop_reason))


async def test_corrupt_data_that_the_stage_found_is_told_with_stage_and_kind() -> None:
    line = encode_corruption(Corruption("logits", "3 of them"))
    with pytest.raises(CorruptDataError, match=r"stage '\w+': corrupt data \(logits\): 3 of them") as caught:
        await outputs_of(last_output("error", line))
    assert caught.value.kind == "logits"
    (output,) = await outputs_of(last_output("stop", line))  # a stop string
    assert output.finish_reason == "stop"


async def test_stop_string_that_is_spelled_like_a_refusal_is_none() -> None:
    (output,) = await outputs_of(last_output("stop", GRAMMAR_TOO_SLOW))
    assert output.finish_reason == "stop"


@pytest.mark.parametrize(
    ("end_token", "include", "skip_special", "texts"),
    [
        (7, False, True, ["w5"]),
        (7, True, True, ["w5", "w7"]),
        (8, True, True, ["w5"]),
        (8, True, False, ["w5", "<|end|>"]),
    ],
)
async def test_end_token_has_a_log_probability_where_the_text_shows_it(
    end_token: int, include: bool, skip_special: bool, texts: list[str]
) -> None:
    engine = FakeEngine()
    params = SamplingParams(logprobs=0, include_stop_str_in_output=include, skip_special_tokens=skip_special)
    stream = await handle_of(engine).open("a", (1, 2), params)
    output = last_output("stop", end_token)
    output.outputs[0].token_ids = [5, end_token]
    output.outputs[0].logprobs = [{5: Logprob(-1.0)}, {end_token: Logprob(-2.0)}]
    engine.queue.put(output)
    (got,) = [one async for one in stream.outputs()]
    assert [token.sampled.text for token in got.logprobs] == texts


CHARACTER = tuple("語".encode())


@pytest.mark.parametrize(
    ("pieces", "reason", "text"),
    [
        pytest.param([((5,), "w5"), (CHARACTER[:2], "")], "length", "w5\ufffd", id="one character"),
        pytest.param([((5, *CHARACTER[:2]), "w5")], "length", "w5\ufffd", id="in the last output"),
        pytest.param([((5,), "w5"), (CHARACTER[:1] * 20, "")], "length", "w5" + "\ufffd" * 20, id="many"),
        pytest.param(
            [((5,), "w5"), ((*CHARACTER[:2], 8), "")], "stop", "w5\ufffd", id="before the end token"
        ),
        pytest.param([(CHARACTER[:2], ""), ((8,) * 20, "")], "length", "\ufffd", id="before special tokens"),
        pytest.param(
            [(CHARACTER[:2], ""), ((*CHARACTER[2:], *CHARACTER), "語語")], "length", "語語", id="whole"
        ),
        pytest.param(
            [((5,), "w5"), ((*CHARACTER[:2], 5), "\ufffdw5")], "length", "w5\ufffdw5", id="in the middle"
        ),
        pytest.param([((5, *CHARACTER[:2]), "")], "a stop string", "", id="cut"),
    ],
)
async def test_text_that_ends_inside_a_character_ends_with_a_replacement_character(
    pieces: list[tuple[tuple[int, ...], str]], reason: str, text: str
) -> None:
    """vLLM gives no text for the beginning of a character."""
    engine = FakeEngine()
    stream = await handle_of(engine).open("a", (1, 2), SamplingParams())
    got = ""
    outputs = stream.outputs()
    for number, (token_ids, piece) in enumerate(pieces, 1):
        is_last = number == len(pieces)
        output = last_output("length" if reason == "length" else "stop", None)
        completion = output.outputs[0]
        completion.token_ids, completion.text = list(token_ids), piece
        if not is_last:
            completion.finish_reason, output.finished = None, False
        elif reason == "a stop string":
            completion.stop_reason = reason
        engine.queue.put(output)
        got += (await anext(outputs)).text
    assert got == text
