import io
import wave

import numpy as np

from benchmarks.serving.workload import QUESTION_SAMPLE_RATE, WORKLOADS, make_turn, speech_like, wav_file


def test_speech_has_its_length_and_stays_within_its_peak() -> None:
    samples = speech_like(5.0, np.random.default_rng(1))

    assert samples.shape == (5 * QUESTION_SAMPLE_RATE,)
    assert 0.45 < np.abs(samples).max() <= 0.5


def test_the_same_seed_gives_the_same_speech_and_another_one_other_speech() -> None:
    first, again, other = (speech_like(1.0, np.random.default_rng(seed)) for seed in (1, 1, 2))

    assert np.array_equal(first, again)
    assert not np.allclose(first, other, atol=0.05)


def test_speech_rises_and_falls_and_has_its_energy_where_voices_have_it() -> None:
    samples = speech_like(5.0, np.random.default_rng(3))

    loudness = np.sqrt((samples.reshape(-1, QUESTION_SAMPLE_RATE // 50) ** 2).mean(axis=1))
    assert loudness.max() > 10 * np.quantile(loudness, 0.1)
    power = np.abs(np.fft.rfft(samples)) ** 2
    frequency_hz = np.fft.rfftfreq(len(samples), 1 / QUESTION_SAMPLE_RATE)
    assert power[(frequency_hz > 90) & (frequency_hz < 4000)].sum() > 0.95 * power.sum()


def test_the_wav_file_holds_the_samples() -> None:
    with wave.open(io.BytesIO(wav_file(np.array([0.0, 1.0, -1.0, 0.5], dtype=np.float32)))) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (16_000, 1, 2)
        assert np.frombuffer(reader.readframes(4), "<i2").tolist() == [0, 32767, -32767, 16384]


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
    assert len(spoken.wav) == 44 + 2 * 80_000


def test_codec_tokens_mean_samples() -> None:
    assert {name: workload.expected_samples / 24_000 for name, workload in WORKLOADS.items()} == {
        "W1": 5.0,
        "W2": 5.0,
        "W3": 70.0,
        "images": 0.0,
    }
