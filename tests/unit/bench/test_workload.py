import io
import wave

import numpy as np

from benchmarks.serving.workload import QUESTION_SAMPLE_RATE, WORKLOADS, make_turn


def test_no_two_turns_begin_alike() -> None:
    turns = [make_turn(WORKLOADS["W1"], np.random.default_rng([7, index])) for index in range(200)]

    assert len({" ".join(turn.system.split()[:6]) for turn in turns}) == 200


def test_the_same_seed_makes_the_same_turn() -> None:
    first, again = (make_turn(WORKLOADS["W2"], np.random.default_rng(5)) for _ in range(2))

    assert first == again


def test_a_long_prompt_is_long_and_a_spoken_question_has_no_text() -> None:
    long = make_turn(WORKLOADS["W3"], np.random.default_rng(0))
    spoken = make_turn(WORKLOADS["W2"], np.random.default_rng(0))

    assert 2400 < len(long.text.split()) < 2500
    assert long.wav is None
    assert spoken.text == ""
    assert spoken.wav is not None
    with wave.open(io.BytesIO(spoken.wav)) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (16_000, 1, 2)
        assert reader.getnframes() == 5 * QUESTION_SAMPLE_RATE


def test_codec_tokens_mean_samples() -> None:
    assert {name: workload.expected_samples / 24_000 for name, workload in WORKLOADS.items()} == {
        "W1": 5.0,
        "W2": 5.0,
        "W3": 70.0,
        "images": 0.0,
    }
