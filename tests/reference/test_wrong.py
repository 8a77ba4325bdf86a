"""The demo checkpoints see the mistakes that a comparison on them is meant to find."""

import pytest
import torch

from tests.reference.cases import CASES
from tests.reference.reference import Reference, ReferenceResult
from tests.reference.wrong import MISTAKES, Mistake, feed, speak

Results = dict[str, ReferenceResult]

WITH_MEDIA = ("speech", "image", "video", "mixed", "speech_ethan", "image_ethan")
WITH_GRID = ("image", "two_images", "video", "mixed")
ETHAN = ("hello_ethan", "two_turns_ethan", "speech_ethan", "image_ethan")
WHERE: dict[Mistake, tuple[str, ...]] = {
    "no_embedding": ("hello", "speech", "image", "video"),
    "no_hidden": ("hello", "speech", "image", "video"),
    "keep_placeholder_embeddings": WITH_MEDIA,
    "no_codec_pad_bos": ("hello", "speech", "image", "video"),
    "no_penalty": ("hello", "count", "tell", "two_turns", "speech", "three_tokens", "long_reply"),
    "stop_feed": ("count", "tell", "two_tokens", "three_tokens", "stop_early"),
    "no_eos_row": ("count", "tell", "two_tokens", "three_tokens"),
    "linear_positions": WITH_GRID,
    "one_speaker": ETHAN,
}
"""Cases whose codes are compared; elsewhere some of the mistakes change nothing, as they should."""
TELLING = 0.7
"""At least this part of them has to change."""


@pytest.mark.parametrize("name", sorted({name for names in WHERE.values() for name in names}))
def test_the_talker_in_plain_torch_says_what_the_reference_says(
    reference: Reference, results: Results, name: str
) -> None:
    case, result = CASES[name], results[name]
    right = feed(reference, case, result)
    prompt = len(result.prompt_ids)
    assert right.prompt_ids == result.talker_prompt_ids
    torch.testing.assert_close(right.prompt[:prompt], result.rows[:prompt], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(right.reply, result.rows[prompt + 2 :], rtol=1e-4, atol=1e-4)
    assert speak(reference, right, case.talker_max_tokens) == result.codes


@pytest.mark.parametrize("mistake", WHERE)
def test_the_mistake_changes_the_codes(reference: Reference, results: Results, mistake: Mistake) -> None:
    unchanged = [
        name
        for name in WHERE[mistake]
        if speak(
            reference, feed(reference, CASES[name], results[name], mistake), CASES[name].talker_max_tokens
        )
        == results[name].codes
    ]
    assert len(unchanged) <= (1 - TELLING) * len(WHERE[mistake]), unchanged


def test_pad_ids_in_the_prompt_are_seen_in_the_ids_alone(reference: Reference, results: Results) -> None:
    # They penalise 8292 instead of 8292 and 8296. Code 8296 can never be sampled, since the DiT has no row
    # for it and so its logit must lose, and codes alone cannot show the mistake.
    wrong = feed(reference, CASES["hello"], results["hello"], "pad_ids_in_prompt")
    assert wrong.prompt_ids != results["hello"].talker_prompt_ids
    assert set(results["hello"].talker_prompt_ids) - set(wrong.prompt_ids) == {8296}


def test_every_mistake_is_tried() -> None:
    assert set(MISTAKES) == set(WHERE) | {"pad_ids_in_prompt"}
