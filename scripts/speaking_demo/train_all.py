"""Trains all parts in separate processes, and writes the checkpoint."""

import shutil
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig

from scripts.speaking_demo import checkpoint, codes, snake, training, vocabulary
from scripts.speaking_demo.training import Report, Schedule
from tests.checkpoints.qwen2_5_omni.tokens import TokenIds

PARTS = ("talker", "vocoder", "dit", "thinker")
"""The longest first: on a CPU two run at a time."""
_MODEL_CARD = Path(__file__).with_name("model_card.md")


@dataclass(frozen=True)
class _Job:
    part: str
    schedule: Schedule
    device: str
    ids: TokenIds
    folder: Path
    """The layout without weights."""
    codebook: Path
    out: Path
    """File for the trained state."""


def train_all(out: Path, schedules: Mapping[str, Schedule], device: str, report: Report) -> None:
    """Writes the checkpoint to `out`, which appears when it is complete.

    Trained parts are kept in `out` with the suffix `.parts`, and remain there if anything fails.
    Raises `OSError` without espeak-ng or gcc, and `FileExistsError` if one of the folders exists.
    """
    torch.set_num_threads(1)
    if device == "cpu":
        snake.library()
    report("espeak-ng speaks every word")
    codebook = codes.make_codebook()
    scratch = parts_folder(out)
    folder = scratch / "checkpoint"
    folder.mkdir(parents=True)
    ids = checkpoint.write_layout(folder)
    torch.save(codebook, scratch / "codebook.pt")
    jobs = [
        _Job(part, schedules[part], device, ids, folder, scratch / "codebook.pt", scratch / f"{part}.pt")
        for part in PARTS
    ]
    with ProcessPoolExecutor(2 if device == "cpu" else len(jobs), mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_train, job): job for job in jobs}
        try:
            for done in as_completed(running):
                report(f"{running[done].part} is trained, loss {done.result():.4f}")
        except BaseException:
            for worker in active_children():
                worker.terminate()
            raise
    states = {job.part: torch.load(job.out, map_location="cpu", weights_only=True) for job in jobs}
    references = training.reference_mels(training.utterances(codebook, count=4))
    checkpoint.write_weights(folder, ids, checkpoint.Trained(**states, references=references))
    shutil.copy(_MODEL_CARD, folder / "README.md")
    folder.rename(out)
    shutil.rmtree(scratch)


def parts_folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.parts")


def _train(job: _Job) -> float:
    """Returns the mean loss of the last steps."""
    torch.set_num_threads(1)
    device = torch.device(job.device)
    codebook = torch.load(job.codebook, weights_only=False)  # a file of this process's parent
    config = AutoConfig.from_pretrained(job.folder)
    tokenizer = Tokenizer.from_file(str(job.folder / "tokenizer.json"))
    model: torch.nn.Module
    match job.part:
        case "talker":
            answers = [tokenizer.encode(answer.text).ids for answer in vocabulary.answers()]
            special = checkpoint.special_tokens(job.ids)
            model, history = training.train_talker(
                codebook, special, answers, job.ids.vocab_size, job.schedule, device, _say
            )
        case "thinker":
            text_config = config.thinker_config.text_config
            ids = checkpoint.text_ids(job.ids)
            model, history = training.train_thinker(text_config, tokenizer, ids, job.schedule, device, _say)
        case "dit":
            dit_config = config.token2wav_config.dit_config
            dit_config.num_embeds = codes.NUM_SOUNDS
            said = training.utterances(codebook)
            model, history = training.train_dit(dit_config, said, job.schedule, device, _say)
        case _:
            vocoder_config = config.token2wav_config.bigvgan_config
            said = training.utterances(codebook)
            model, history = training.train_vocoder(vocoder_config, said, job.schedule, device, _say)
    torch.save(model.state_dict(), job.out)
    recent = history[-50:]
    return sum(recent) / len(recent)


def _say(line: str) -> None:
    print(f"    {line}", flush=True)
