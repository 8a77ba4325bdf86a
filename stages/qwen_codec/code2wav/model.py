"""The code2wav stage as vLLM loads it: what the families' models have in common."""

from collections.abc import Iterable, Set
from typing import cast

import torch
from vllm.config import VllmConfig

from omni_server.config.stages import DiffusionStage
from omni_server.protocol.corruption import Corruption
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.transport.result import Failure
from stages.qwen_codec.code2wav.graphed_passes import GraphedPasses
from stages.qwen_codec.code2wav.network import Code2WavNetwork
from stages.qwen_codec.code2wav.passes import Passes
from stages.qwen_codec.code2wav.stream_decoder import StreamDecoder, WindowJob
from stages.qwen_codec.codec_layout import Code2WavLayout
from stages.qwen_codec.codec_window import CodecWindow
from stages.runtime.checkpoint_weights import load_weights_exactly
from stages.runtime.cuda_graphs import CudaGraphRecorder
from stages.runtime.diffusion_model import DiffusionBatch, DiffusionModel, RejectedRequestsError


class Code2WavModel(DiffusionModel):
    """Weights, state and computation have the stage's dtype."""

    def __init__(
        self,
        network: Code2WavNetwork,
        layout: Code2WavLayout,
        weight_prefix: str,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        """`weight_prefix`: of the network's weights in the checkpoint."""
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        runtime = cast(DiffusionRuntimeConfig, vllm_config.additional_config)
        assert isinstance(runtime.stage, DiffusionStage)
        self._stage = runtime.stage
        self._is_fast = runtime.is_fast
        # A step needs a slot for each of its windows, even if none leaves any state.
        self._num_slots = max(runtime.num_streams, runtime.stage.max_num_seqs)
        self._codebook_size = network.codebook_size
        self._num_codebooks = network.num_codebooks
        self._layout = layout
        self._weight_prefix = weight_prefix
        self.code2wav = network.to(getattr(torch, runtime.compute_dtype))
        self._decoder: StreamDecoder

    def prepare(self) -> None:
        """Allocate the memory of the streams' state, and record CUDA graphs if the config enables them."""
        with torch.inference_mode():
            self._decoder = StreamDecoder(self._passes(), self._layout)

    def _passes(self) -> Passes:
        max_frames = max(1, self._stage.max_num_batched_tokens // self._num_codebooks)
        if not self._is_fast:
            return Passes(self.code2wav, num_slots=self._num_slots, max_frames=max_frames)
        return GraphedPasses(
            self.code2wav,
            CudaGraphRecorder(),
            num_slots=self._num_slots,
            max_num_streams=self._stage.max_num_seqs,
            max_frames=max_frames,
        )

    def sample(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        """Returns each window's waveform, float32 [num_frames * samples per frame]; the first window of a
        stream has `Code2WavLayout.lead_samples` less.

        `batch.inputs` are encoded `CodecWindow`s. Raises `RejectedRequestsError` for invalid requests, such
        as a window that does not continue its stream."""
        return [waveform.float() for waveform in self._decoder.run(self._jobs(batch))]

    def _jobs(self, batch: DiffusionBatch) -> list[WindowJob]:
        jobs: list[WindowJob] = []
        reasons: dict[str, Failure] = {}
        streams: set[str] = set()
        for request_id, codes, data in zip(batch.request_ids, batch.token_ids, batch.inputs, strict=True):
            try:
                window = CodecWindow.decode(data)
                window.validate(
                    len(codes),
                    num_codebooks=self._num_codebooks,
                    context_frames=self._layout.context_frames,
                )
            except ValueError as error:
                reasons[request_id] = str(error)
                continue
            past = torch.from_numpy(window.past_codes())
            corruption = (
                self._outside_table(codes) or self._outside_table(past) or self._out_of_order(window, streams)
            )
            if corruption is not None:
                reasons[request_id] = corruption
                continue
            streams.add(window.stream)
            jobs.append(WindowJob(window, *(c.view(-1, self._num_codebooks) for c in (codes, past))))
        if reasons:
            raise RejectedRequestsError(reasons)
        return jobs

    def _outside_table(self, codes: torch.Tensor) -> Corruption | None:
        for code in (int(codes.min()), int(codes.max())) if len(codes) else ():
            if not 0 <= code < self._codebook_size:
                detail = f"codec token {code} is outside the codebooks of {self._codebook_size} codes"
                return Corruption("codes", detail)
        return None

    def _out_of_order(self, window: CodecWindow, streams: Set[str]) -> Corruption | None:
        """`streams`: those that have a window in this batch."""
        if window.stream in streams:
            detail = "another window of its stream is in the same step: send one after the other"
            return Corruption("window_sequence", detail)
        expected = self._decoder.streams.end_of(window.stream)
        if expected is None or expected == window.first_frame:
            return None
        return Corruption(
            "window_sequence",
            f"a window from frame {window.first_frame} on, where {expected} is the next one",
        )

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """Lets vLLM's loader skip files with other stages' weights only."""
        return not name.startswith(self._weight_prefix)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy the network's weights. Raises `ConfigError` if one is missing, unknown or misshapen."""
        loaded = load_weights_exactly(self.code2wav, weights, self._weight_prefix)
        return {f"code2wav.{name}" for name in loaded}

    @torch.no_grad()
    def randomize_weights(self) -> None:
        """Draw weights with which the waveform is neither constant nor at full scale; scales become 1."""
        for name, weight in self.code2wav.named_parameters():
            if weight.ndim > 1:
                generator = torch.Generator(weight.device).manual_seed(0)
                fan_in = weight.numel() / len(weight)
                # Residual branches add to what they get, so each layer returns a little less than it gets.
                weight.normal_(0, (2 * fan_in) ** -0.5, generator=generator)
            elif name.endswith(("weight", "gamma", "scale")):
                weight.fill_(1)
