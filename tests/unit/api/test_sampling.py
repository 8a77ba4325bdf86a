"""Which stage a sampling field acts on."""

from typing import Any

import pytest

from omni_server.types import SamplingConfig, SpeechOutput
from tests.unit.api.clients import SPEECH, request_for


async def test_fields_of_the_request_act_on_the_thinker_only() -> None:
    request = await request_for(
        **SPEECH,
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.1,
        stop=["a", "b"],
        stop_token_ids=[5],
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
    )
    assert request.sampling == {
        "thinker": SamplingConfig(
            temperature=0,
            top_p=0.5,
            top_k=7,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=-1.5,
            repetition_penalty=1.1,
            stop=("a", "b"),
            stop_token_ids=(5,),
            max_tokens=9,
            min_tokens=2,
            ignore_eos=True,
        ),
        "talker": SamplingConfig(),
    }


async def test_stage_sampling_acts_on_the_talker_only() -> None:
    talker: dict[str, Any] = {
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 11,
        "max_tokens": 100,
        "min_tokens": 10,
        "ignore_eos": False,
    }
    request = await request_for(**SPEECH, stage_sampling={"talker": talker})
    assert request.sampling == {
        "thinker": SamplingConfig(),
        "talker": SamplingConfig(**talker | {"top_k": 0}),
    }


async def test_talker_has_no_sampling_without_speech() -> None:
    request = await request_for(seed=1, stage_sampling={"talker": {"seed": 2}})
    assert request.sampling == {"thinker": SamplingConfig(seed=1)}
    assert request.speech is None


async def test_max_completion_tokens_wins() -> None:
    request = await request_for(max_tokens=50, max_completion_tokens=1)
    assert request.sampling["thinker"].max_tokens == 1


async def test_fields_that_steer_single_tokens_act_on_the_thinker() -> None:
    request = await request_for(
        **SPEECH,
        logit_bias={"5": 1, "06": -100},
        allowed_token_ids=[5, 6],
        bad_words=["x"],
        include_stop_str_in_output=True,
        skip_special_tokens=True,
        logprobs=True,
        top_logprobs=20,
    )
    assert request.sampling == {
        "thinker": SamplingConfig(
            logit_bias={5: 1, 6: -100},
            allowed_token_ids=(5, 6),
            bad_words=("x",),
            include_stop_str_in_output=True,
            skip_special_tokens=True,
            logprobs=20,
        ),
        "talker": SamplingConfig(),
    }


@pytest.mark.parametrize(
    ("fields", "thinker"),
    [
        ({"stop": "x"}, SamplingConfig(stop=("x",))),
        ({"logit_bias": {}}, SamplingConfig()),
        ({"skip_special_tokens": False}, SamplingConfig(skip_special_tokens=False)),
        ({"stop_token_ids": [6, 5, 6]}, SamplingConfig(stop_token_ids=(6, 5))),
        ({"allowed_token_ids": [5, 6, 5]}, SamplingConfig(allowed_token_ids=(5, 6))),
    ],
)
async def test_spellings_that_mean_the_same(fields: dict[str, Any], thinker: SamplingConfig) -> None:
    assert (await request_for(**fields)).sampling == {"thinker": thinker}


@pytest.mark.parametrize(
    ("fields", "talker_seed", "noise_seed"),
    [
        ({}, None, None),
        ({"seed": 7}, 7, 7),
        ({"seed": 7, "stage_sampling": {"talker": {"seed": 8}}}, 8, 7),
        ({"stage_sampling": {"talker": {"seed": 8}}}, 8, None),
        ({"seed": -1}, -1, 2**63 - 1),
    ],
)
async def test_seed_reaches_every_stage(
    fields: dict[str, Any], talker_seed: int | None, noise_seed: int | None
) -> None:
    request = await request_for(**SPEECH, **fields)
    assert request.sampling["thinker"].seed == fields.get("seed")
    assert request.sampling["talker"].seed == talker_seed
    assert request.speech == SpeechOutput(voice="Ethan", seed=noise_seed)
