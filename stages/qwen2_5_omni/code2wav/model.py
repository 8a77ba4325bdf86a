"""The code2wav stage as vLLM loads it: DiT, vocoder and voices of one Qwen2.5-Omni checkpoint."""

from collections.abc import Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavDiTModel,
)
from vllm.config import VllmConfig

from omni_server.errors import ConfigError
from omni_server.protocol.corruption import Corruption
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.transport.result import Failure
from stages.qwen2_5_omni.code2wav.noise import noise_frames
from stages.qwen2_5_omni.code2wav.pipeline import Code2WavPipeline, WindowJob
from stages.qwen2_5_omni.code2wav.voices import VOICES_FILE, load_voices
from stages.qwen2_5_omni.codec_window import CodecWindow
from stages.runtime.checkpoint_weights import load_weights_exactly
from stages.runtime.diffusion_model import DiffusionBatch, DiffusionModel, RejectedRequestsError

WEIGHT_PREFIX = "token2wav."

NOISE_THREADS = 8
"""NumPy draws random numbers without the GIL, so a batch's noise is drawn in parallel."""


class Qwen2_5OmniCode2Wav(DiffusionModel):
    """Loads weights in float32 regardless of the checkpoint's dtype. `prepare` converts them to a
    `Code2WavPipeline` and releases the modules."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        self._runtime = cast(DiffusionRuntimeConfig, vllm_config.additional_config)
        # Attribute names match the checkpoint. The reference also uses SDPA.
        options = {"attn_implementation": "sdpa", "dtype": torch.float32}
        dit = Qwen2_5OmniToken2WavDiTModel._from_config(config.dit_config, **options)
        bigvgan = Qwen2_5OmniToken2WavBigVGANModel._from_config(config.bigvgan_config, **options)
        self.code2wav_dit_model: Qwen2_5OmniToken2WavDiTModel | None = dit
        self.code2wav_bigvgan_model: Qwen2_5OmniToken2WavBigVGANModel | None = bigvgan
        self.eval()  # the DiT has dropout
        self._frames_per_code: int = config.dit_config.repeats
        self._codes_per_block: int = config.dit_config.block_size // config.dit_config.repeats
        self._mel_dim: int = config.dit_config.mel_dim
        self._table_size: int = config.dit_config.num_embeds + 1
        self._voices = load_voices(Path(vllm_config.model_config.model))
        wanted = (config.dit_config.enc_emb_dim, config.dit_config.mel_dim)
        for voice in self._voices.values():
            widths = (voice.conditioning.shape[-1], voice.reference_mel.shape[-1])
            if widths != wanted:
                raise ConfigError(
                    f"{VOICES_FILE}: voice '{voice.name}' has widths {widths}, the model's are {wanted}"
                )
        self._voice_rows = {name: row for row, name in enumerate(self._voices)}
        self._pipeline: Code2WavPipeline
        self._noise_threads = ThreadPoolExecutor(NOISE_THREADS, "noise")

    def prepare(self) -> None:
        """Fold and cast the weights; compile kernels and record CUDA graphs if the config enables them."""
        dit, bigvgan = self.code2wav_dit_model, self.code2wav_bigvgan_model
        assert dit is not None
        assert bigvgan is not None
        self._pipeline = Code2WavPipeline(dit, bigvgan, tuple(self._voices.values()), self._runtime)
        self.code2wav_dit_model = self.code2wav_bigvgan_model = None

    def sample(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        """Returns each window's emitted waveform, float32 [num_codes * samples per code].

        `batch.inputs` are encoded `CodecWindow`s. A window that names a stream keeps state for the next one,
        as long as there are no more than `DiffusionRuntimeConfig.num_streams` streams. Raises
        `RejectedRequestsError` for invalid requests, such as a stream's second window in a batch.
        """
        windows = self._windows(batch)
        return self._pipeline.run(list(self._noise_threads.map(self._job, windows, batch.token_ids)))

    def _windows(self, batch: DiffusionBatch) -> list[CodecWindow]:
        windows: list[CodecWindow] = []
        reasons: dict[str, Failure] = {}
        streams: set[str] = set()
        for request_id, codes, data in zip(batch.request_ids, batch.token_ids, batch.inputs, strict=True):
            try:
                window = CodecWindow.decode(data)
                window.validate(
                    len(codes), codes_per_block=self._codes_per_block, frames_per_code=self._frames_per_code
                )
                if window.voice not in self._voices:
                    raise ValueError(
                        f"there is no voice '{window.voice}'; voices are {', '.join(self._voices)}"
                    )
            except ValueError as error:
                reasons[request_id] = str(error)
                continue
            corruption = self._outside_table(codes) or self._out_of_order(window, streams)
            if corruption is not None:
                reasons[request_id] = corruption
                continue
            if window.stream is not None:
                streams.add(window.stream)
            windows.append(window)
        if reasons:
            raise RejectedRequestsError(reasons)
        return windows

    def _outside_table(self, codes: torch.Tensor) -> Corruption | None:
        for code in (int(codes.min()), int(codes.max())):
            if not 0 <= code < self._table_size:
                detail = f"codec token {code} is outside the table of {self._table_size} codes"
                return Corruption("codes", detail)
        return None

    def _out_of_order(self, window: CodecWindow, streams: Set[str]) -> Corruption | None:
        """`streams`: those that have a window in this batch."""
        if window.stream is None:
            return None
        if window.stream in streams:
            detail = "another window of its stream is in the same step: send one after the other"
            return Corruption("window_sequence", detail)
        expected = self._pipeline.streams.end_of(window.stream)
        if expected is None or expected == window.emit_start:
            return None
        return Corruption(
            "window_sequence", f"a window from code {window.emit_start} on, where {expected} is the next one"
        )

    def _job(self, window: CodecWindow, codes: torch.Tensor) -> WindowJob:
        frames = self._frames_per_code
        noise = noise_frames(
            window.noise_seed, window.first_code * frames, len(codes) * frames, self._mel_dim
        )
        return WindowJob(window, codes, torch.from_numpy(noise), self._voice_rows[window.voice])

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Lets vLLM's loader skip files with other stages' weights only."""
        return not name.startswith(WEIGHT_PREFIX)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy the `token2wav.` weights. Raises `ConfigError` if one is missing, unknown or misshapen."""
        return load_weights_exactly(self, weights, WEIGHT_PREFIX)
