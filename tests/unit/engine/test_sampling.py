"""Our sampling settings as vLLM's."""

import pytest
from vllm import SamplingParams

from omni_server.config.stages import SamplingDefaults
from omni_server.engine.sampling import merged, sampling_params
from omni_server.errors import InvalidRequestError
from omni_server.protocol.rows import RowsInput, RowsOutput
from omni_server.types import SamplingConfig

END = (40, 41)


def text(sampling: SamplingConfig, rows: RowsOutput | None = None) -> SamplingParams:
    return sampling_params("thinker", sampling, end_ids=END, is_text=True, rows=rows)


def codes(sampling: SamplingConfig, rows: RowsInput | None = None) -> SamplingParams:
    return sampling_params("talker", sampling, end_ids=END, is_text=False, rows=rows)


def test_the_requests_value_wins_over_the_stage_configs() -> None:
    defaults = SamplingDefaults(temperature=0.3, top_k=40, max_tokens=100, ignore_eos=True)
    got = merged(defaults, SamplingConfig(temperature=0.0, ignore_eos=False, stop=("x",)))
    assert got == SamplingConfig(temperature=0.0, top_k=40, max_tokens=100, ignore_eos=False, stop=("x",))


def test_without_a_request_the_stage_config_holds() -> None:
    assert merged(SamplingDefaults(top_p=0.8), None) == SamplingConfig(top_p=0.8)


def test_unset_values_are_left_to_vllm() -> None:
    got, plain = text(SamplingConfig()), SamplingParams()
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed"):
        assert getattr(got, name) == getattr(plain, name), name


def test_every_value_reaches_vllm() -> None:
    got = text(
        SamplingConfig(
            temperature=0.7,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            seed=8,
            max_tokens=20,
            min_tokens=3,
            stop=("a", "b"),
            stop_token_ids=(7,),
        )
    )
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.7, 0.9, 5, 0.1)
    assert (got.repetition_penalty, got.presence_penalty, got.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (got.seed, got.max_tokens, got.min_tokens) == (8, 20, 3)
    assert got.stop == ["a", "b"]
    assert got.stop_token_ids == [7, *END]


def test_only_the_given_end_ids_end_a_sequence() -> None:
    """vLLM would add the tokenizer's, which is not the thinker's and no code of the talker."""
    got = codes(SamplingConfig())
    assert got.ignore_eos
    assert got.stop_token_ids == list(END)


def test_text_that_ignores_its_end_token_has_no_end_ids() -> None:
    got = text(SamplingConfig(ignore_eos=True, max_tokens=30))
    assert got.stop_token_ids == []
    assert got.min_tokens == 0


def test_stop_ids_of_the_request_hold_also_when_the_end_token_is_ignored() -> None:
    assert text(SamplingConfig(ignore_eos=True, stop_token_ids=(7,))).stop_token_ids == [7]


def test_codes_that_ignore_their_end_never_sample_it() -> None:
    got = codes(SamplingConfig(ignore_eos=True, max_tokens=30))
    assert got.min_tokens == 30
    assert set(END) <= got.all_stop_token_ids


def test_codes_that_ignore_their_end_need_a_limit() -> None:
    with pytest.raises(InvalidRequestError, match="needs 'max_tokens'") as error:
        codes(SamplingConfig(ignore_eos=True))
    assert error.value.param == "stage_sampling.talker.max_tokens"


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=-1.0),
        SamplingConfig(top_p=1.5),
        SamplingConfig(max_tokens=0),
        SamplingConfig(max_tokens=3, min_tokens=4),
        SamplingConfig(repetition_penalty=0.0),
    ],
)
def test_values_that_vllm_refuses_are_the_clients_mistake(sampling: SamplingConfig) -> None:
    with pytest.raises(InvalidRequestError, match="thinker: "):
        text(sampling)


def test_a_fed_stage_has_its_repetition_penalty() -> None:
    assert (
        codes(SamplingConfig(repetition_penalty=1.05), RowsInput(num_replaced=12)).repetition_penalty == 1.05
    )
    with pytest.raises(InvalidRequestError, match="repetition_penalty"):
        codes(SamplingConfig(repetition_penalty=-1.0), RowsInput(num_replaced=12))


def test_every_seed_is_a_seed() -> None:
    assert text(SamplingConfig(seed=-2)).seed == -2
    assert text(SamplingConfig(seed=-1)).seed == 2**63 - 1  # vLLM takes -1 for none
