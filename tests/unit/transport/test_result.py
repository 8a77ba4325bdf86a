"""Results and failures of a diffusion stage as tensors."""

import pytest
import torch

from omni_server.errors import CorruptDataError, InvalidRequestError, StageError
from omni_server.protocol.corruption import CORRUPTION_KINDS, Corruption, CorruptionKind, encode_corruption
from omni_server.transport.result import MAX_MESSAGE_BYTES, Refusal, decode_result, encode_failure


@pytest.mark.parametrize("message", ["unknown voice 'Ünbekannt'", "x"])
def test_a_failure_arrives_with_stage_and_message(message: str) -> None:
    with pytest.raises(StageError) as caught:
        decode_result(encode_failure(message), "code2wav")
    assert caught.value.stage == "code2wav"
    assert caught.value.message == f"stage 'code2wav': {message}"


def test_a_failure_without_a_message_is_still_one() -> None:
    with pytest.raises(StageError):
        decode_result(encode_failure(""), "code2wav")


@pytest.mark.parametrize("kind", CORRUPTION_KINDS)
def test_corrupt_data_arrives_with_its_kind(kind: CorruptionKind) -> None:
    with pytest.raises(CorruptDataError) as caught:
        decode_result(encode_failure(Corruption(kind, "what was found")), "code2wav")
    assert (caught.value.stage, caught.value.kind) == ("code2wav", kind)
    assert (caught.value.status, caught.value.code) == (500, "corrupt_data")
    assert caught.value.message == f"stage 'code2wav': corrupt data ({kind}): what was found"


@pytest.mark.parametrize(
    "refusal",
    [Refusal("invalid_value", "Image too small: 32×32."), Refusal("moderation_blocked", "not this image")],
)
def test_a_refusal_arrives_as_an_error_of_the_caller(refusal: Refusal) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_result(encode_failure(refusal), "image")
    error = caught.value
    assert (error.status, error.code, error.message) == (400, refusal.code, refusal.message)


def test_a_kind_that_nobody_knows_is_a_failure_all_the_same() -> None:
    message = encode_corruption(Corruption("samples", "x")).replace("samples", "unheard-of")
    with pytest.raises(StageError, match="unheard-of") as caught:
        decode_result(encode_failure(message), "code2wav")
    assert not isinstance(caught.value, CorruptDataError)


def test_a_long_message_is_cut() -> None:
    failure = encode_failure("ä" * MAX_MESSAGE_BYTES)
    assert failure.numel() == MAX_MESSAGE_BYTES
    with pytest.raises(StageError, match="ää"):
        decode_result(failure, "code2wav")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_anything_else_is_no_result(dtype: torch.dtype) -> None:
    with pytest.raises(StageError, match="floating"):
        decode_result(torch.zeros(3, dtype=dtype), "code2wav")
