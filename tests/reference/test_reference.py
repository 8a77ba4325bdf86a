"""The reference behaves as the comparisons with it take for granted."""

import numpy as np
import pytest
import torch

from tests.reference.cases import CASES, SPEECH_SYSTEM_PROMPT, ask, run
from tests.reference.reference import Reference, ReferenceResult

Results = dict[str, ReferenceResult]

TEXT_ONLY = ("hello", "count")
SPOKEN = [name for name in CASES if name != "one_token"]


def _noise(frames: int) -> torch.Tensor:
    return torch.randn(frames, 80, generator=torch.Generator().manual_seed(7))


def test_there_are_cases_of_every_kind(results: Results) -> None:
    voices = {case.voice for case in CASES.values()}
    media = {type(part).__name__ for case in CASES.values() for m in case.messages for part in m.content}
    assert len(CASES) >= 17
    assert voices == {"Chelsie", "Ethan"}
    assert media == {"TextPart", "AudioPart", "ImagePart", "VideoPart"}
    assert any(message.role == "assistant" for case in CASES.values() for message in case.messages)
    assert {1, 2, 3} <= {len(result.text_ids) for result in results.values()}
    assert len(results["long_reply"].text_ids) >= 200


def test_the_restored_mask_gives_the_codes_of_a_padded_batch(reference: Reference) -> None:
    cases = [CASES[name] for name in TEXT_ONLY]
    alone = [
        reference.run(case.messages, thinker_max_tokens=24, talker_max_tokens=60).codes for case in cases
    ]
    together = reference.batch_codes([case.messages for case in cases], 24, 60)
    assert len(reference.prompt(cases[0].messages)["input_ids"][0]) != len(
        reference.prompt(cases[1].messages)["input_ids"][0]
    )
    # Both rows run with the mask of the padded one; in a batch a row goes on until the longest ends.
    assert together == alone


def test_without_the_repair_the_reference_says_something_else(reference: Reference) -> None:
    case = CASES["count"]
    repaired = run(reference, case)
    with reference.unrepaired():
        unrepaired = run(reference, case)
    assert unrepaired.text_ids == repaired.text_ids
    assert unrepaired.codes != repaired.codes


@pytest.mark.parametrize("name", SPOKEN)
def test_shapes_fit_together(results: Results, reference: Reference, name: str) -> None:
    result, talker = results[name], reference.model.talker
    prompt, text, codes = len(result.prompt_ids), len(result.text_ids), len(result.codes)
    hidden = reference.model.config.thinker_config.text_config.hidden_size
    assert result.talker_prompt_ids == (8296,) * prompt + (8292, 8293)
    assert result.rows.shape == (prompt + text + 2, hidden)
    assert result.positions.shape == (3, prompt + 2)
    assert result.mel.shape == (80, 2 * codes)
    assert result.waveform.shape == (480 * codes,)
    assert result.waveform.dtype == np.float32
    text_embedding = reference.model.thinker.get_input_embeddings().weight
    torch.testing.assert_close(result.rows[-2], text_embedding[talker.text_eos_token])
    torch.testing.assert_close(result.rows[-1], text_embedding[talker.text_pad_token])


def test_one_token_is_not_spoken(results: Results) -> None:
    result = results["one_token"]
    assert len(result.text_ids) == 1
    assert result.codes == ()
    assert result.waveform.shape == (0,)


@pytest.mark.parametrize("name", ["image", "two_images", "video", "mixed"])
def test_the_talker_sees_the_grid_of_images_and_videos(results: Results, name: str) -> None:
    result = results[name]
    assert result.delta < 0
    assert not torch.equal(result.positions[0], result.positions[1])


def test_first_and_second_choice_are_apart(results: Results) -> None:
    close = {
        name: (result.min_top2_gap_thinker, result.min_top2_gap_talker)
        for name, result in results.items()
        if min(result.min_top2_gap_thinker, result.min_top2_gap_talker) < 1e-4
    }
    assert close == {}


def test_replies_are_not_degenerate(results: Results) -> None:
    long = [result for result in results.values() if len(result.codes) >= 40]
    assert len(long) >= 10
    for result in long:
        assert len(set(result.codes)) > len(result.codes) / 3
    texts = [result.text_ids for result in results.values() if len(result.text_ids) >= 20]
    assert len(texts) >= 3
    for text in texts:
        assert len(set(text)) > len(text) / 2
    # prompts are told apart
    assert len({result.text_ids for result in results.values()}) >= 12
    assert len({result.codes for result in results.values()}) >= 18


def test_speech_ends_by_itself_and_by_its_limit(results: Results) -> None:
    stops = {result.stop_code for name, result in results.items() if name != "one_token"}
    assert None in stops
    assert stops & {8292, 8294}


def test_the_waveform_is_audible_and_not_clipped(results: Results) -> None:
    for result in results.values():
        if len(result.codes) >= 10:
            assert 0.05 < float(np.sqrt(np.mean(result.waveform**2))) < 0.2
            assert np.abs(result.waveform).max() < 0.95


@pytest.mark.parametrize("name", ["hello", "two_turns", "speech", "image"])
def test_voices_sound_and_speak_differently(results: Results, name: str) -> None:
    chelsie, ethan = results[name], results[f"{name}_ethan"]
    assert chelsie.text_ids[: len(ethan.text_ids)] == ethan.text_ids
    shortest = min(len(chelsie.codes), len(ethan.codes))
    assert chelsie.codes[:shortest] != ethan.codes[:shortest]


def test_injected_noise_decides_the_waveform_and_nothing_else(reference: Reference) -> None:
    def speak(noise: object) -> ReferenceResult:
        return run(reference, CASES["three_tokens"], noise)  # type: ignore[arg-type]

    first, again, other = speak(_noise), speak(_noise), speak(lambda frames: -_noise(frames))
    assert np.array_equal(first.waveform, again.waveform)
    assert first.codes == other.codes
    assert not np.allclose(first.mel, other.mel, atol=0.1)


def test_injected_noise_leaves_torch_as_it_was(reference: Reference) -> None:
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    run(reference, CASES["two_tokens"], _noise)
    assert torch.equal(torch.randn(3), expected)


def test_codes_decide_the_mel(reference: Reference, results: Results) -> None:
    model = reference.model.token2wav
    voice = reference.model.speaker_map["Chelsie"]
    mels = []
    for name in ("hello", "tell"):
        codes = torch.tensor(results[name].codes[:20])[None]
        torch.manual_seed(0)
        mels.append(model.code2wav_dit_model.sample(voice["cond"], voice["ref_mel"], codes))
    assert (mels[0] - mels[1]).square().mean().sqrt() > 0.1


def test_a_system_turn_is_added_where_there_is_none(reference: Reference) -> None:
    with_speech_prompt = reference.prompt(ask("Hello"))["input_ids"][0]
    plain = reference.prompt(ask("Hello")[1:])["input_ids"][0]
    decode = reference.processor.tokenizer.decode
    assert SPEECH_SYSTEM_PROMPT in decode(with_speech_prompt)
    assert "You are a helpful assistant." in decode(plain)
