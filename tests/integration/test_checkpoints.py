"""The same on other sizes, and with tensor parallelism."""

from pathlib import Path

from omni_server.verify.compare import signal_to_noise_db
from tests.integration.live import LiveOmni, demo_config
from tests.integration.parity import expected, same_tokens
from tests.integration.test_parity import WAVEFORM_SNR_DB
from tests.reference.cases import CASES
from tests.reference.reference import Reference

NAMES = (
    "tell",
    "two_turns",
    "speech",
    "speech_behind_text",
    "image",
    "two_images",
    "video",
    "mixed",
    "hello_ethan",
    "speech_ethan",
    "one_token",
    "two_tokens",
    "stop_early_image",
)


def test_answers_equal_the_reference_on_other_sizes(other_sizes: Path, answer_folder: Path) -> None:
    reference = Reference(other_sizes, answer_folder)
    wanted = [expected(reference, CASES[case]) for case in NAMES]
    live = LiveOmni(other_sizes, demo_config(chunks={"mode": "whole"}))
    try:
        answers = live.answers([want.request for want in wanted])
    finally:
        live.close()
    for answer, want in zip(answers, wanted, strict=True):
        same_tokens(answer, want)
        assert signal_to_noise_db(want.result.waveform, answer.audio) > WAVEFORM_SNR_DB


def test_tensor_parallel_stages_give_the_same_tokens(checkpoint: Path, reference: Reference) -> None:
    wanted = [expected(reference, CASES[case]) for case in ("count", "speech", "video", "two_turns_ethan")]
    config = demo_config(
        stages={"thinker": {"tensor_parallel_size": 2}, "talker": {"tensor_parallel_size": 2}}
    )
    live = LiveOmni(checkpoint, config)
    try:
        for answer, want in zip(live.answers([w.request for w in wanted]), wanted, strict=True):
            same_tokens(answer, want)
        assert live.held_rows() == 0
        assert live.row_slots().in_use == 0
    finally:
        live.close()
