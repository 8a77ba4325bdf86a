"""Speaks with the reference implementation of Qwen3-TTS, qwen-tts-hf: greedily, on the CPU. It computes codes
in float32 and waveforms in float64.

Usage: python -m tests.reference.qwen3_tts_reference

Each line of its input is a JSON list: a file with questions, and one for the answers.
`tests.reference.qwen3_tts` runs it in the environment of `scripts/setup-consumers`, writes the questions and
reads the answers. It is a program because the package changes functions of transformers for the whole
process."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import MimiConfig

from tests.reference.qwen3_tts_wrong import mistaken

SAMPLES_PER_FRAME = 1920

Question = dict[str, Any]
Answer = dict[str, Any]


class Reference:
    def __init__(self, folder: Path) -> None:
        config = Qwen3TTSConfig.from_pretrained(folder)
        self.model = Qwen3TTSForConditionalGeneration.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        # In float32, the rounding of a waveform depends on the number of frames and on the CPU.
        self.model.speech_tokenizer.model.decoder.double()
        check_names(folder / "model.safetensors", self.model)
        check_names(folder / "speech_tokenizer" / "model.safetensors", self.model.speech_tokenizer.model)
        # qwen_tts itself loads it with `fix_mistral_regex`, which changes it, unless it comes from the Hub.
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._watch()

    def _watch(self) -> None:
        talker = self.model.talker
        generate, predict = talker.generate, talker.code_predictor.generate

        def watched_talker(**kwargs: Any) -> Any:
            shortest = max(kwargs["min_new_tokens"], self._min_frames)
            result = generate(**kwargs | {"min_new_tokens": shortest}, output_scores=True)
            self._prompt_lengths = kwargs["attention_mask"].sum(-1).tolist()
            self._first_codes, self._scores = result.sequences, result.scores
            return result

        def watched_predictor(**kwargs: Any) -> Any:
            result = predict(**kwargs, output_scores=True)
            self._predictor_scores.append(result.scores)
            return result

        def watch_rows(_module: Any, _args: Any, kwargs: Any) -> None:
            self._rows.append(kwargs["inputs_embeds"].clone())

        talker.generate, talker.code_predictor.generate = watched_talker, watched_predictor
        talker.model.register_forward_pre_hook(watch_rows, with_kwargs=True)

    def answer(self, task: dict[str, Any]) -> dict[str, Answer]:
        """By the names of the questions, or the numbers of the recordings."""
        match task:
            case {"speak": questions}:
                answers = self.speak(questions)
                return {q["name"]: answer for q, answer in zip(questions, answers, strict=True)}
            case {"mistake": mistake, "ask": question}:
                with mistaken(self, mistake, question) as asked:
                    return {mistake: self.speak([asked])[0]}
            case {"hear": recordings}:
                return {str(i): self.hear(samples) for i, samples in enumerate(recordings)}
            case {"decode": codes}:
                return {"": {"waveform": self.decode(torch.tensor(codes))}}
        raise ValueError(f"unknown task {list(task)}")

    @torch.inference_mode()
    def speak(self, questions: list[Question]) -> list[Answer]:
        """All of them in one batch. They must agree on how the text is read and on the shortest answer."""
        self._rows: list[torch.Tensor] = []
        self._predictor_scores: list[tuple[torch.Tensor, ...]] = []
        [streams_text] = {question["streams_text"] for question in questions}
        [self._min_frames] = {question["min_frames"] for question in questions}
        texts = [self._assistant(question["text"]) for question in questions]
        codes, _ = self.model.generate(
            input_ids=texts,
            instruct_ids=[self.user(question["instructions"]) for question in questions],
            languages=[question["language"] for question in questions],
            non_streaming_mode=not streams_text,
            # The last frame is completed in the step after it.
            max_new_tokens=1 + max(question["max_frames"] for question in questions),
            do_sample=False,
            subtalker_dosample=False,
            **self._voices(questions),
        )
        return [
            self._answer(i, question, texts[i], codes[i][: question["max_frames"]])
            for i, question in enumerate(questions)
        ]

    def _answer(self, i: int, question: Question, text: torch.Tensor, codes: torch.Tensor) -> Answer:
        """What was seen of one row of the batch, up to the longest answer to its question."""
        end, max_frames = self.model.config.talker_config.codec_eos_token_id, question["max_frames"]
        before = clone_codes(question)
        has_ended = end in self._first_codes[i, :max_frames].tolist()
        # A code behind the last frame is of no consequence.
        gaps = [top2_gap(score[i]) for score in self._scores[: len(codes) + has_ended]]
        gaps += [top2_gap(score[i]) for frame in self._predictor_scores[: len(codes)] for score in frame]
        return {
            "text_ids": text[0],
            "prompt_rows": self._rows[0][i, -self._prompt_lengths[i] :],
            "frame_rows": torch.stack([rows[i, 0] for rows in self._rows[1 : len(codes) + 1]]),
            "codes": codes,
            "has_ended": has_ended,
            "waveform": self.decode(torch.cat([before, codes]))[len(before) * SAMPLES_PER_FRAME :],
            "min_top2_gap": min(gaps),
        }

    def _voices(self, questions: list[Question]) -> dict[str, Any]:
        clones = [question["clone"] for question in questions]
        if None in clones:
            return {"speakers": [question["voice"] for question in questions]}
        continues = [bool(clone["codes"]) for clone in clones]
        return {
            "voice_clone_prompt": {
                "ref_code": [
                    clone_codes(q) if is_icl else None for q, is_icl in zip(questions, continues, strict=True)
                ],
                "ref_spk_embedding": [torch.tensor(clone["vector"]) for clone in clones],
                "x_vector_only_mode": [not is_icl for is_icl in continues],
                "icl_mode": continues,
            },
            "ref_ids": [self._reference(clone["text"]) for clone in clones],
        }

    @torch.inference_mode()
    def hear(self, samples: list[float]) -> Answer:
        """The voice in audio of 24 kHz."""
        audio = np.array(samples, dtype=np.float32)
        codes = self.model.speech_tokenizer.encode(audio, sr=24_000).audio_codes[0]
        return {"vector": self.model.extract_speaker_embedding(audio, 24_000), "codes": codes}

    @torch.inference_mode()
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """In one pass. By itself, the reference decodes 300 frames at a time."""
        decoder = self.model.speech_tokenizer.model.decoder
        return decoder(codes.T[None])[0, 0]

    def _assistant(self, text: str) -> torch.Tensor:
        return self._ids(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n")

    def _reference(self, text: str) -> torch.Tensor:
        return self._ids(f"<|im_start|>assistant\n{text}<|im_end|>\n")

    def user(self, text: str | None) -> torch.Tensor | None:
        return None if text is None else self._ids(f"<|im_start|>user\n{text}<|im_end|>\n")

    def _ids(self, text: str) -> torch.Tensor:
        return torch.tensor([self.tokenizer.encode(text, add_special_tokens=False).ids])


def check_names(file: Path, model: torch.nn.Module) -> None:
    """transformers would draw what is missing."""
    with safe_open(file, "pt") as tensors:
        if differing := set(tensors.keys()) ^ set(model.state_dict()):
            raise ValueError(f"{file}: {sorted(differing)} are in the file or in the model only")


def clone_codes(question: Question) -> torch.Tensor:
    codes = question["clone"]["codes"] if question["clone"] else []
    return torch.tensor(codes, dtype=torch.long).reshape(-1, 16)


def top2_gap(scores: torch.Tensor) -> float:
    return float(-scores.topk(2).values.diff())


def main() -> None:
    torch.set_num_threads(1)  # these models are too small for more
    transformers.logging.set_verbosity_error()
    # qwen_tts reads it of every model that is loaded; transformers keeps it in `rope_parameters`.
    MimiConfig.rope_theta = 10_000.0
    references: dict[str, Reference] = {}
    for line in sys.stdin:
        questions_file, answers_file = json.loads(line)
        arrays: dict[str, np.ndarray] = {}
        for task in json.loads(Path(questions_file).read_text()):
            folder = task["checkpoint"]
            if folder not in references:
                references[folder] = Reference(Path(folder))
            answers = references[folder].answer(task)
            arrays |= {f"{name}.{key}": np.asarray(v) for name, a in answers.items() for key, v in a.items()}
        np.savez(answers_file, **arrays)
        sys.stdout.write("answered\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
