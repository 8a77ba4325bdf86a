"""Serves the speaking demo and measures its intelligibility."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer

from omni_server.config.load import find_stage_config, load_stage_config
from omni_server.errors import ConfigError
from omni_server.omni import AsyncOmni
from omni_server.types import (
    SAMPLE_RATE_HZ,
    AudioDelta,
    ChatMessage,
    CodecDelta,
    OmniRequest,
    ReadAloud,
    SamplingConfig,
    SpeechOutput,
    TextDelta,
    TextPart,
)
from scripts.speaking_demo import codes, vocabulary
from scripts.speaking_demo.recogniser import Floats, Recogniser, hear, nearest, num_in_order
from scripts.speaking_demo.voice import SPEAKERS, render

STAGE_CONFIG = "qwen2_5_omni.demo-cpu"
SENTENCES = Path(__file__).resolve().parents[2] / "tests" / "data" / "unseen_sentences.txt"

MIN_ANSWERS = 0.95
"""Words found in answers as served, as a share of those found in the voice's own readings of them."""
MIN_SENTENCES = 0.90
MIN_NEAREST = 1.0
MIN_OWN_READING = 0.98
"""Words found in the voice's own readings: a poor recogniser would rate everything as good."""
MAX_EXTRA = 0.1
"""Words found that are not in the text, as a share of those that are."""
MAX_REAL_TIME_FACTOR = 0.7
NUM_CORES = 2
"""Used to measure the real-time factor."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Utterance:
    name: str
    question: str | None
    """None if `text` is to be read aloud."""
    text: str


@dataclass(frozen=True)
class Manner:
    voice: str
    is_greedy: bool

    def num_together(self) -> int:
        """Concurrent requests. Times are measured only with one, which is how the demo is used."""
        return 4 if self.is_greedy else 1

    def __str__(self) -> str:
        return f"{self.voice}, {'greedy' if self.is_greedy else 'default sampling'}"


MANNERS = tuple(
    Manner(voice, is_greedy) for is_greedy in (True, False) for voice in sorted(SPEAKERS, reverse=True)
)


@dataclass(frozen=True)
class Served:
    text: str
    codes: tuple[int, ...]
    audio: Floats
    wall_s: float
    first_audio_s: float


@dataclass(frozen=True)
class Mark:
    """How one utterance was spoken."""

    written: str | None
    """None if the thinker wrote the right text."""
    wanted: list[str]
    found: list[str]
    first_wrong_code: int | None
    nearest: int
    """Index of the most similar reading."""
    index: int
    """Index of its own."""

    def num_found(self) -> int:
        return num_in_order(self.wanted, self.found)

    def faults(self) -> Iterator[str]:
        if self.written is not None:
            yield f"wrote {self.written!r}"
        if self.first_wrong_code is not None:
            yield f"code {self.first_wrong_code} is wrong"
        if self.found != self.wanted:
            yield f"heard {' '.join(self.found)!r}, not {' '.join(self.wanted)!r}"
        if self.nearest != self.index:
            yield f"nearest to reading {self.nearest}, not to {self.index}"


@dataclass(frozen=True)
class Row:
    """Sums over the answers or the sentences in one manner."""

    kind: str
    manner: Manner
    num: int
    num_exact_texts: int
    num_exact_codes: int
    """Utterances in which every code is correct."""
    num_words: int
    found_as_read: int
    """Words that the recogniser finds in the voice's own readings."""
    found_as_served: int
    num_extra: int
    """Words found that are not in the text or out of place."""
    num_nearest: int
    audio_s: float
    wall_s: float
    first_audio_ms: float
    """The median."""

    def share_found(self) -> float:
        return self.found_as_served / max(1, self.found_as_read)

    def share_found_as_read(self) -> float:
        return self.found_as_read / self.num_words

    def share_extra(self) -> float:
        return self.num_extra / self.num_words

    def is_timed(self) -> bool:
        return self.manner.num_together() == 1

    def real_time_factor(self) -> float:
        return self.wall_s / max(self.audio_s, 1e-9)


def utterances(every: int = 1) -> dict[str, list[Utterance]]:
    """All answers and all unseen sentences, or one in `every`."""
    answers = [
        Utterance(f"answer_{index:02}", answer.questions[0], answer.text)
        for index, answer in enumerate(vocabulary.answers())
    ]
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()
    sentences = [Utterance(f"sentence_{index:02}", None, line) for index, line in enumerate(lines)]
    return {"answers": answers[::every], "sentences": sentences[::every]}


def judge(checkpoint: Path, out: Path, *, every: int, num_samples: int, report: Report) -> bool:
    """Writes tables, waveforms and spectrograms to `out`. True if all limits hold.

    "All codes exact" holds only with the espeak-ng that the checkpoint was trained with. Raises `OmniError`
    if the checkpoint cannot be served and `OSError` without espeak-ng.
    """
    out.mkdir(parents=True, exist_ok=True)
    for earlier in (*out.glob("answer_*"), *out.glob("sentence_*")):
        earlier.unlink()
    _use_cores(NUM_CORES)
    torch.set_num_threads(1)
    kinds = utterances(every)
    report("espeak-ng speaks every word")
    codebook = codes.make_codebook()
    _check_tokenizer(checkpoint, [utterance for kind in kinds.values() for utterance in kind])
    served = asyncio.run(_serve(checkpoint, kinds, report))
    rows: list[Row] = []
    faults: list[str] = []
    for voice in SPEAKERS:
        recogniser = Recogniser(codebook, SPEAKERS[voice])
        for kind, said in kinds.items():
            readings = [
                render(
                    codebook.envelope(list(vocabulary.read(utterance.text))), SPEAKERS[voice], seed
                ).numpy()
                for seed, utterance in enumerate(said)
            ]
            heard_readings = [hear(reading) for reading in readings]
            texts = [recogniser.wanted(utterance.text) for utterance in said]
            found_as_read = sum(
                num_in_order(text, recogniser.found(heard))
                for text, heard in zip(texts, heard_readings, strict=True)
            )
            for manner in (manner for manner in MANNERS if manner.voice == voice):
                spoken = served[manner, kind]
                marks = [
                    _mark(
                        utterance, one, heard_readings, index, recogniser, codes_of(codebook, utterance.text)
                    )
                    for index, (utterance, one) in enumerate(zip(said, spoken, strict=True))
                ]
                row = _row(kind, manner, marks, spoken, found_as_read)
                report(f"{kind}, {manner}: {row.found_as_served} of {row.num_words} words found")
                rows.append(row)
                faults += [
                    f"{utterance.name}, {manner}: {fault}"
                    for utterance, mark in zip(said, marks, strict=True)
                    for fault in mark.faults()
                ]
                _write_samples(out, manner, said[:num_samples], spoken, readings)
    limits = limits_of(rows)
    text = f"{table(rows)}\n\n{_limits_table(limits)}\n"
    (out / "judge.md").write_text(text, encoding="utf-8")
    (out / "faults.txt").write_text("".join(fault + "\n" for fault in faults), encoding="utf-8")
    report(f"written to {out}\n\n{text}")
    return all(is_kept for *_, is_kept in limits)


def _use_cores(count: int) -> None:
    """Pins this process and its engines to `count` cores. Raises `ConfigError` if there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        raise ConfigError(f"{count} CPU cores are needed, and {len(cores)} can be used")
    os.sched_setaffinity(0, cores[:count])


def _check_tokenizer(checkpoint: Path, said: Sequence[Utterance]) -> None:
    """Raises `ConfigError` if the checkpoint and the voice read a text differently."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    for utterance in said:
        num_tokens = len(tokenizer.encode(utterance.text, add_special_tokens=False).ids)
        if num_tokens != len(list(vocabulary.read(utterance.text))):
            raise ConfigError(
                f"{checkpoint} was made with another vocabulary: it reads {utterance.text!r} otherwise"
            )


async def _serve(
    checkpoint: Path, kinds: dict[str, list[Utterance]], report: Report
) -> dict[tuple[Manner, str], list[Served]]:
    served: dict[tuple[Manner, str], list[Served]] = {}
    async with _engines(checkpoint, report) as omni:
        for manner in MANNERS:
            for kind, said in kinds.items():
                begin = time.monotonic()
                served[manner, kind] = await _speak_all(omni, said, manner)
                report(f"{kind}, {manner}: {len(said)} served in {time.monotonic() - begin:.0f} s")
    return served


@asynccontextmanager
async def _engines(checkpoint: Path, report: Report) -> AsyncIterator[AsyncOmni]:
    config = load_stage_config(find_stage_config(STAGE_CONFIG))
    omni = await AsyncOmni.start(checkpoint, config, on_progress=report)
    try:
        yield omni
    finally:
        await omni.stop()


async def _speak_all(omni: AsyncOmni, said: Sequence[Utterance], manner: Manner) -> list[Served]:
    room = asyncio.Semaphore(manner.num_together())

    async def in_turn(utterance: Utterance, seed: int) -> Served:
        async with room:
            return await _speak(omni, utterance, manner, seed)

    return await asyncio.gather(*(in_turn(utterance, seed) for seed, utterance in enumerate(said)))


async def _speak(omni: AsyncOmni, utterance: Utterance, manner: Manner, seed: int) -> Served:
    if utterance.question is None:
        messages, given = omni.task_messages(ReadAloud(utterance.text)), utterance.text
    else:
        messages, given = (ChatMessage("user", (TextPart(utterance.question),)),), None
    sampling = SamplingConfig(temperature=0.0) if manner.is_greedy else SamplingConfig(seed=seed)
    stages = {"talker": sampling} if given else {"thinker": sampling, "talker": sampling}
    request = OmniRequest(
        f"{utterance.name} {manner}", messages, SpeechOutput(manner.voice, seed, given), stages
    )
    text: list[str] = []
    spoken: list[int] = []
    audio: list[npt.NDArray[np.float32]] = []
    first_audio_s = float("inf")
    begin = time.perf_counter()
    async for event in await omni.submit(request):
        match event:
            case TextDelta():
                text.append(event.text)
            case CodecDelta():
                spoken += event.codes
            case AudioDelta():
                first_audio_s = min(first_audio_s, time.perf_counter() - begin)
                audio.append(event.samples)
    wall_s = time.perf_counter() - begin
    samples = np.concatenate(audio) if audio else np.zeros(0, np.float32)
    return Served("".join(text), tuple(spoken), samples, wall_s, first_audio_s)


def codes_of(codebook: codes.Codebook, text: str) -> tuple[int, ...]:
    """What the talker should say, without the code that ends it."""
    units = [*vocabulary.read(text), vocabulary.NO_PAUSE]
    lengths = [codes.SILENT_STEPS + len(codebook.units[unit]) for unit in units]
    token = torch.cat([torch.full((length,), index) for index, length in enumerate(lengths)])
    step = torch.cat([torch.arange(length) for length in lengths])
    return tuple(codes.to_ids(codebook.sounds(units[:-1]), token, step).tolist())


def _mark(
    utterance: Utterance,
    served: Served,
    readings: Sequence[Floats],
    index: int,
    recogniser: Recogniser,
    wanted_codes: tuple[int, ...],
) -> Mark:
    """`readings` are of all utterances of this kind; `index` is this one's."""
    heard = hear(served.audio)
    return Mark(
        written=None if served.text == utterance.text else served.text,
        wanted=recogniser.wanted(utterance.text),
        found=recogniser.found(heard),
        first_wrong_code=_first_difference(served.codes, wanted_codes),
        nearest=nearest(heard, readings),
        index=index,
    )


def _first_difference(codes_: tuple[int, ...], wanted: tuple[int, ...]) -> int | None:
    if codes_ == wanted:
        return None
    differ = (at for at, (code, other) in enumerate(zip(codes_, wanted, strict=False)) if code != other)
    return next(differ, min(len(codes_), len(wanted)))


def _row(
    kind: str, manner: Manner, marks: Sequence[Mark], served: Sequence[Served], found_as_read: int
) -> Row:
    return Row(
        kind,
        manner,
        num=len(marks),
        num_exact_texts=sum(mark.written is None for mark in marks),
        num_exact_codes=sum(mark.first_wrong_code is None for mark in marks),
        num_words=sum(len(mark.wanted) for mark in marks),
        found_as_read=found_as_read,
        found_as_served=sum(mark.num_found() for mark in marks),
        num_extra=sum(len(mark.found) - mark.num_found() for mark in marks),
        num_nearest=sum(mark.nearest == mark.index for mark in marks),
        audio_s=sum(len(spoken.audio) for spoken in served) / SAMPLE_RATE_HZ,
        wall_s=sum(spoken.wall_s for spoken in served),
        first_audio_ms=1000 * float(np.median([spoken.first_audio_s for spoken in served])),
    )


def _write_samples(
    out: Path, manner: Manner, said: Sequence[Utterance], served: Sequence[Served], readings: Sequence[Floats]
) -> None:
    """Writes each reading once for both ways of sampling."""
    for utterance, spoken, reading in zip(said, served, readings, strict=False):
        stem = f"{utterance.name}_{manner.voice.lower()}"
        stem_served = f"{stem}_{'greedy' if manner.is_greedy else 'sampled'}"
        soundfile.write(out / f"{stem_served}.wav", spoken.audio, SAMPLE_RATE_HZ, subtype="PCM_16")
        soundfile.write(out / f"{stem}_own_reading.wav", reading, SAMPLE_RATE_HZ, subtype="PCM_16")
        picture = side_by_side(f"{utterance.text}   ({manner})", spoken.audio, reading)
        picture.save(out / f"{stem_served}.png")


_PICTURE_FFT, _PICTURE_HOP = 512, 120
_PICTURE_RANGE_DB = 70.0
_MARGIN = 16
"""Pixels for a line of text."""


def side_by_side(title: str, served: Floats, reading: Floats) -> Image.Image:
    """Spectrograms on one time axis: the served audio above the voice's own reading."""
    panels = [("as served", _spectrogram(served)), ("own reading", _spectrogram(reading))]
    width = max(panel.width for _, panel in panels)
    height = panels[0][1].height + _MARGIN
    picture = Image.new("L", (width, _MARGIN + 2 * height), 255)
    draw = ImageDraw.Draw(picture)
    draw.text((2, 2), title.encode("latin-1", "replace").decode("latin-1"), fill=0)
    for index, (label, panel) in enumerate(panels):
        top = _MARGIN + index * height
        draw.text((2, top + 2), label, fill=0)
        picture.paste(panel, (0, top + _MARGIN))
    return picture


def _spectrogram(wave: Floats) -> Image.Image:
    """0 to 12 kHz from bottom to top, 5 ms per pixel; dark is loud."""
    padded = torch.nn.functional.pad(torch.from_numpy(wave), (0, max(0, _PICTURE_FFT - len(wave))))
    window = torch.hann_window(_PICTURE_FFT)
    spectrum = torch.stft(
        padded, _PICTURE_FFT, _PICTURE_HOP, window=window, return_complex=True, center=False
    )
    level_db = 20 * spectrum.abs().clamp(min=1e-5).log10()
    brightness = ((level_db.max() - level_db) / _PICTURE_RANGE_DB).clamp(0, 1)
    return Image.fromarray((255 * brightness).flip(0).to(torch.uint8).numpy())


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| spoken | texts exact | all codes exact | words | found in own reading | found as served | share | extra "
        "| nearest to own reading | audio s | real-time factor | first audio ms |",
        "|---|" + "---:|" * 11,
    ]
    for row in rows:
        cells = (
            f"{row.kind}, {row.manner}",
            f"{row.num_exact_texts} of {row.num}",
            f"{row.num_exact_codes} of {row.num}",
            row.num_words,
            row.found_as_read,
            row.found_as_served,
            f"{100 * row.share_found():.1f} %",
            row.num_extra,
            f"{row.num_nearest} of {row.num}",
            f"{row.audio_s:.1f}",
            f"{row.real_time_factor():.2f}" if row.is_timed() else "",
            f"{row.first_audio_ms:.0f}" if row.is_timed() else "",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def limits_of(rows: Sequence[Row]) -> list[tuple[str, str, str, bool]]:
    """Metric, limit, worst row, and whether that is within it."""
    answers = [row for row in rows if row.kind == "answers"]
    sentences = [row for row in rows if row.kind == "sentences"]
    of_answers = min(row.share_found() for row in answers)
    of_sentences = min(row.share_found() for row in sentences)
    of_nearest = min(row.num_nearest / row.num for row in answers)
    own = min(row.share_found_as_read() for row in rows)
    extra = max(row.share_extra() for row in rows)
    factor = max(row.real_time_factor() for row in rows if row.is_timed())

    def at_least(what: str, limit: float, share: float) -> tuple[str, str, str, bool]:
        return what, f"at least {100 * limit:.0f} %", f"{100 * share:.1f} %", share >= limit

    return [
        at_least("words found in answers, of those in their own readings", MIN_ANSWERS, of_answers),
        at_least("words found in unseen sentences, likewise", MIN_SENTENCES, of_sentences),
        at_least("answers nearest to their own reading", MIN_NEAREST, of_nearest),
        at_least("words found in the voice's own readings", MIN_OWN_READING, own),
        (
            "words found that are not in the text",
            f"at most {100 * MAX_EXTRA:.0f} %",
            f"{100 * extra:.1f} %",
            extra <= MAX_EXTRA,
        ),
        (
            f"real-time factor on {NUM_CORES} cores, one at a time",
            f"below {MAX_REAL_TIME_FACTOR}",
            f"{factor:.2f}",
            factor < MAX_REAL_TIME_FACTOR,
        ),
    ]


def _limits_table(limits: Sequence[tuple[str, str, str, bool]]) -> str:
    lines = ["| limit | wanted | worst | kept |", "|---|---:|---:|---|"]
    lines += [
        f"| {what} | {wanted} | {worst} | {'yes' if is_kept else 'NO'} |"
        for what, wanted, worst, is_kept in limits
    ]
    return "\n".join(lines)
