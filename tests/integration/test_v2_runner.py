"""vLLM's V2 model runner gives the reference's tokens, as V1 does, where Triton's interpreter runs its
kernels.

On GPUs it is the default, and tests/gpu shows the same there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.parity import expected
from tests.reference.cases import CASES
from tests.reference.qwen3_cases import QWEN3_CASES
from tests.reference.qwen3_reference import Qwen3Reference
from tests.reference.reference import Reference

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("two_turns", "two_turns_ethan", "image_ethan", "speech", "tell", "speech_and_text")
QWEN3_NAMES = ("image", "three_turns_chelsie", "three_turns")


def answers_on_v2(family: str, checkpoint: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """All cases at once, with preemption, prompts cut into chunks, and asynchronous scheduling."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).with_name("v2_on_cpu"))]),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_COMPUTE_NANS_IN_LOGITS": "0",  # vLLM's kernel for it calls the GPU's library
    }
    command = [sys.executable, "-m", "tests.integration.answers_on_v2", family, str(checkpoint), *names]
    child = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def answers(checkpoint: Path) -> dict[str, Any]:
    return answers_on_v2("qwen2_5_omni", checkpoint, NAMES)


def test_requests_at_once_give_the_tokens_of_the_reference(
    answers: dict[str, Any], reference: Reference
) -> None:
    assert answers["generations"] == {"thinker": 2, "talker": 2}
    wanted = [expected(reference, CASES[name]).result for name in NAMES]
    assert answers["text_ids"] == [list(result.text_ids) for result in wanted]
    assert answers["codes"] == [list(result.codes) for result in wanted]


def test_most_steps_of_the_talker_are_prepared_by_one_kernel(answers: dict[str, Any]) -> None:
    """Whenever a step has the requests of the one before."""
    assert answers["steady_steps"]["talker"] > max(map(len, answers["codes"])) / 2
    assert answers["steady_steps"]["thinker"] == 0


def test_preempted_requests_were_taken_up_again_and_nothing_is_held(answers: dict[str, Any]) -> None:
    assert min(answers["resumed"].values()) > 0
    assert answers["held_rows"] == 0
    assert answers["slots_in_use"] == 0


@pytest.fixture(scope="module")
def qwen3_answers(qwen3_checkpoint: Path) -> dict[str, Any]:
    return answers_on_v2("qwen3_omni", qwen3_checkpoint, QWEN3_NAMES)


def test_qwen3_gives_the_texts_and_frames_of_the_reference(
    qwen3_answers: dict[str, Any], qwen3_reference: Qwen3Reference
) -> None:
    """Three requests at once, and all 16 codes of each frame."""
    assert qwen3_answers["generations"] == {"thinker": 2, "talker": 2}
    wanted = [expected(qwen3_reference, QWEN3_CASES[name]).result for name in QWEN3_NAMES]
    assert qwen3_answers["text_ids"] == [list(result.text_ids) for result in wanted]
    assert qwen3_answers["codes"] == [list(result.codes) for result in wanted]


def test_qwen3_takes_preempted_requests_up_again_and_holds_nothing(qwen3_answers: dict[str, Any]) -> None:
    assert qwen3_answers["resumed"]["talker"] > 0
    assert qwen3_answers["held_rows"] == 0
    assert qwen3_answers["slots_in_use"] == 0
