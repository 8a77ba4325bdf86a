"""Qwen2.5-Omni that spoils the data of one request while a file says so. Named by the stage config of these
tests alone.

The victim is known by its length, and by its voice where there are codec tokens only. What is spoiled in the
server's own process is here, the models that do it in the engines are in `corrupting_models`.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.edge import DecoderWindow
from omni_server.family import CodecLayout, HfOverrides
from omni_server.orchestrator.row_feeder import RowFeeder
from omni_server.protocol.rows import RowsFeed, RowsPayload
from stages.codec_chunking import Window
from stages.qwen2_5_omni.family import Qwen25OmniFamily, Qwen25OmniModel
from stages.qwen2_5_omni.hf_overrides import code2wav_config, talker_config
from stages.qwen2_5_omni.talker_to_code2wav import TalkerToCode2Wav
from tests.faults.orders import FOLDER_VARIABLE

CLASSES: dict[str, str] = {
    "thinker": "CorruptingThinker",
    "talker": "CorruptingTalker",
    "code2wav": "CorruptingCode2Wav",
}
VICTIM_LENGTH = 300
"""The victim's prompt is longer; prompt and reply of all others are shorter, in both language models."""
VICTIM_VOICE = "Ethan"


def order_to_spoil(folder: Path, place: str, what: str) -> None:
    """From now on, until it is withdrawn."""
    (folder / f"new-{place}").write_text(what)
    (folder / f"new-{place}").rename(folder / f"spoil-{place}")


def ordered(place: str) -> str | None:
    """What is to be spoiled there."""
    try:
        return (Path(os.environ[FOLDER_VARIABLE]) / f"spoil-{place}").read_text()
    except FileNotFoundError:
        return None


class CorruptingFamily(Qwen25OmniFamily):
    engine_modules = (*Qwen25OmniFamily.engine_modules, "tests.faults.corrupting_models")

    def open(self, model_dir: Path) -> Qwen25OmniModel:
        """In the server's process only."""
        RowFeeder.take = spoiled_take  # type: ignore[method-assign, assignment]
        return super().open(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        overrides = {
            "thinker": corrupting_thinker,
            "talker": corrupting_talker,
            "code2wav": corrupting_code2wav,
        }
        return overrides[model_stage]

    def register(self) -> None:
        super().register()
        register_corrupting_models()


def register_corrupting_models() -> None:
    from vllm import ModelRegistry

    from tests.faults import corrupting_models

    for name in CLASSES.values():
        ModelRegistry.register_model(name, vars(corrupting_models)[name])


def corrupting_thinker(config: Any) -> Any:
    return _with_class(config, "thinker")


def corrupting_talker(config: Any) -> Any:
    return _with_class(talker_config(config), "talker")


def corrupting_code2wav(config: Any) -> Any:
    return _with_class(code2wav_config(config), "code2wav")


def _with_class(config: Any, model_stage: str) -> Any:
    config.architectures = [CLASSES[model_stage]]
    return config


_take = RowFeeder.take


def spoiled_take(feeder: RowFeeder, payload: RowsPayload) -> None:
    """Portions of rows on their way from the thinker to the talker: the victim's row of its third token."""
    what = ordered("rows")
    if what is None or payload.prompt_length < VICTIM_LENGTH or payload.num_generated_rows != 3:
        _take(feeder, payload)
    elif what == "lost":
        feeder._outbox.drop(RowsFeed(payload))
    elif what == "twice":
        _take(feeder, payload)
        _take(feeder, payload)
    else:
        raise AssertionError(what)


class CorruptingCodecEdge(TalkerToCode2Wav):
    """Windows on their way from the talker to code2wav: the victim's second."""

    def __init__(self, plan: ChunkPlan, layout: CodecLayout, *, voice: str, noise_seed: int) -> None:
        super().__init__(plan, layout, voice=voice, noise_seed=noise_seed)
        self._is_victim = voice == VICTIM_VOICE
        self._sent: list[DecoderWindow] = []

    def _requests(self, windows: Sequence[Window[int]]) -> list[DecoderWindow]:
        what = ordered("windows") if self._is_victim else None
        return [out for window in super()._requests(windows) for out in self._spoiled(window, what)]

    def _spoiled(self, window: DecoderWindow, what: str | None) -> list[DecoderWindow]:
        self._sent.append(window)
        if len(self._sent) != 2 or what is None:
            return [window]
        match what:
            case "lost":
                return []
            case "twice":
                return [window, window]
            case "the first again":  # in the place of the second, so that only code2wav can notice
                first = self._sent[0]
                return [replace(first, first_sample=window.first_sample, num_samples=window.num_samples)]
            case "unknown code":
                return [replace(window, token_ids=(9000, *window.token_ids[1:]))]
            case _:
                raise AssertionError(what)


FAMILY = CorruptingFamily()
