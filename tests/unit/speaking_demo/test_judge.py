"""scripts/judge_demo without a server: what it expects, and what it makes of what it got."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from scripts.speaking_demo import checkpoint, codes, judge
from scripts.speaking_demo.codes import Codebook
from scripts.speaking_demo.talker import Speech
from tests.checkpoints.qwen2_5_omni.tokens import TokenIds

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "judge_demo"

GOOD = judge.Row(
    "answers",
    judge.Manner("Ethan", is_greedy=False),
    num=40,
    num_exact_texts=40,
    num_exact_codes=40,
    num_words=400,
    found_as_read=400,
    found_as_served=390,
    num_extra=0,
    num_nearest=40,
    audio_s=100.0,
    wall_s=40.0,
    first_audio_ms=200.0,
)


def kept(answers: judge.Row, sentences: judge.Row) -> list[bool]:
    return [is_kept for *_, is_kept in judge.limits_of([GOOD, answers, replace(sentences, kind="sentences")])]


def test_both_voices_are_judged_in_both_ways_of_sampling() -> None:
    assert {(manner.voice, manner.is_greedy) for manner in judge.MANNERS} == {
        ("Ethan", True),
        ("Ethan", False),
        ("Chelsie", True),
        ("Chelsie", False),
    }


def test_expected_codes_are_those_that_the_talker_learns(
    codebook: Codebook, tokenizer: Tokenizer, layout: tuple[Path, TokenIds]
) -> None:
    text = "Hello! I am 12, and you?"
    speech = Speech(codebook, checkpoint.special_tokens(layout[1]))
    sound, token, step = speech.layout(tokenizer.encode(text, add_special_tokens=False).ids)
    assert judge.codes_of(codebook, text) == tuple(codes.to_ids(sound, token, step).tolist())


def test_limits_go_by_the_worst_row() -> None:
    assert kept(GOOD, GOOD) == [True] * 6
    assert kept(replace(GOOD, found_as_served=379), GOOD) == [False, True, True, True, True, True]
    assert kept(GOOD, replace(GOOD, found_as_served=359)) == [True, False, True, True, True, True]
    assert kept(GOOD, replace(GOOD, found_as_served=361, num_nearest=39)) == [True] * 6
    assert kept(replace(GOOD, num_nearest=39), GOOD) == [True, True, False, True, True, True]
    assert kept(GOOD, replace(GOOD, found_as_read=391, num_words=400)) == [
        True,
        True,
        True,
        False,
        True,
        True,
    ]
    assert kept(GOOD, replace(GOOD, num_extra=41)) == [True, True, True, True, False, True]
    assert kept(GOOD, replace(GOOD, wall_s=70.0)) == [True, True, True, True, True, False]


def test_table_has_a_row_for_each() -> None:
    lines = judge.table([GOOD, replace(GOOD, kind="sentences")]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith(
        "| answers, Ethan, default sampling | 40 of 40 | 40 of 40 | 400 | 400 | 390 | 97.5 % | 0 | 40 of 40"
    )


def test_picture_shows_both_on_one_time_axis() -> None:
    wave = torch.sin(torch.arange(24_000) / 10).numpy()
    picture = judge.side_by_side("A tone", wave, wave[:12_000])
    assert picture.width == 1 + (24_000 - 512) // 120
    top, bottom = picture.crop((0, 40, 90, 260)), picture.crop((0, 40 + 273, 90, 260 + 273))
    assert top.tobytes() == bottom.tobytes()


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    finished = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert f"{tmp_path} holds no checkpoint" in finished.stderr
