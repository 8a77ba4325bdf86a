"""The kernel that samples a whole step gives the tokens of vLLM's own kernels, and leaves to vLLM what it
cannot do.

Both are interpreted here, on the CPU; tests/gpu/test_fused_sampler.py compares them on a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def compared() -> dict[str, list[dict[str, Any]]]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).with_name("v2_on_cpu"))])
    }
    # Servers of this process have it on; the interpreter cannot run vLLM's own count.
    environment["VLLM_COMPUTE_NANS_IN_LOGITS"] = "0"
    command = [sys.executable, "-m", "tests.integration.fused_sampler_on_cpu"]
    child = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, list[dict[str, Any]]] = json.loads(child.stdout.splitlines()[-1])
    return result


def test_mixed_batches_get_vllms_tokens_from_one_kernel(compared: dict[str, list[dict[str, Any]]]) -> None:
    made = compared["mixed"]
    assert [one for one in made if one["ours"] != one["vllms"]] == []
    assert all(one["fused"] for one in made)
    assert len({tuple(one["ours"]) for one in made}) > len(made) / 2  # they are sampled, not all the same


def test_top_k_keeps_the_first_of_more_equal_values_than_it_may_keep(
    compared: dict[str, list[dict[str, Any]]],
) -> None:
    (made,) = compared["many_equal"]
    assert made["fused"]
    assert made["ours"] == made["vllms"]


def test_what_the_kernel_cannot_do_is_vllms(compared: dict[str, list[dict[str, Any]]]) -> None:
    made = compared["out_of_the_ordinary"]
    assert {one["what"] for one in made if one["fused"]} == {"nothing", "raw logprobs"}
    assert [one for one in made if one["ours"] != one["vllms"]] == []


def test_a_whole_step_is_answered_as_vllm_answers_it(compared: dict[str, list[dict[str, Any]]]) -> None:
    made = {one["what"]: one for one in compared["whole_steps"]}
    assert [one for one in made.values() if one["ours"] != one["vllms"]] == []
    assert made["decoding"]["fused"]
    assert made["decoding"]["ours"]["numbers"] == [["torch.int32", [1, 1, 1]], ["torch.int32", [0, 0, 0]]]
    assert made["a chunk of a prompt"]["ours"]["numbers"][0][1] == [0, 1, 1]
    assert made["logprobs, raw logprobs"]["ours"]["logprobs"] is not None
    assert made["logprobs, sampling masks"]["ours"]["has_mask"]


def test_logits_that_are_not_numbers_are_counted_for_their_request_and_change_no_other(
    compared: dict[str, list[dict[str, Any]]],
) -> None:
    made = {one["what"]: one for one in compared["not_numbers"]}
    for what in ("greedy", "sampled"):
        finite, nan, infinity = (made[f"{what}, {name}"]["ours"] for name in ("finite", "NaN", "infinity"))
        assert made[f"{what}, NaN"]["fused"]
        assert finite["not_numbers"] == [0, 0, 0, 0]
        assert nan["not_numbers"] == [0, 2, 0, 500]
        assert infinity["not_numbers"] == [0, 2, 0, 500]
        assert made[f"{what}, beside a prompt"]["ours"]["not_numbers"] == [0, 2, 0, 500]
        for broken in (nan, infinity):
            assert [broken["tokens"][i] for i in (0, 2)] == [finite["tokens"][i] for i in (0, 2)]
            assert all(0 <= token < 500 for (token,) in broken["tokens"])
