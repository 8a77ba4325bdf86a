"""The talker as a vLLM model: a dense Qwen3 decoder over codec tokens, and the code predictor beside it.

Reference: `Qwen3TTSForConditionalGeneration` in qwen-tts.
"""

from collections.abc import Sequence

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM, Qwen3Model
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

from stages.qwen3_tts.hf_config import Qwen3TTSTalkerConfig, predictor_config
from stages.qwen3_tts.layout import FRAME, NONE, VECTOR, PromptRows
from stages.qwen_codec.frame_talker import FrameTalker, TextRows
from stages.runtime.code_sampling import CodeSampling

_CHECKPOINT = WeightsMapper(
    orig_to_new_prefix={
        "talker.codec_head.": "lm_head.",
        "talker.model.codec_embedding.": "model.embed_tokens.",
        "talker.model.text_embedding.": "text_rows.embedding.",
        "talker.text_projection.": "text_rows.projection.",
        "talker.": "",
        "speaker_encoder.": None,
    }
)
_decoder = msgspec.msgpack.Decoder(PromptRows)


class Qwen3TTSTalker(FrameTalker):
    """Implements `stages.runtime.embeddings_in.ComposesRows`."""

    checkpoint = _CHECKPOINT
    hf_to_vllm_mapper = _CHECKPOINT | Qwen3Model.hf_to_vllm_mapper
    packed_modules_mapping = Qwen3ForCausalLM.packed_modules_mapping
    code_sampling = CodeSampling(temperature=0.9, top_k=50, top_p=1.0)  # the reference's `subtalker_*`

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config: Qwen3TTSTalkerConfig = vllm_config.model_config.hf_config
        inner = config.text_hidden_size
        text_rows = TextRows(config.text_vocab_size, inner, inner, config.hidden_size)
        model = Qwen3Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        super().__init__(model, text_rows, predictor_config(config), vllm_config, prefix)
        self._table: torch.Tensor
        self._codec_table: torch.Tensor
        """Of the first codes, `[vocab_size, hidden_size]` in host memory: reading rows from the device would
        wait for the step that runs there."""

    @torch.no_grad()
    def row_table(self) -> torch.Tensor:
        self._table = super().row_table()
        device = self.model.embed_tokens.weight.device
        self._codec_table = self.embed_input_ids(torch.arange(self.config.vocab_size, device=device)).cpu()
        return self._table

    @torch.no_grad()
    def compose_rows(self, data: bytes) -> torch.Tensor:
        """The rows of an encoded `PromptRows`, `[n, hidden_size]` in host memory. Call it after `row_table`.
        Raises `ValueError` for bytes that are none, and for what they name and is not there."""
        try:
            prompt = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not the rows of a prompt: {error}") from None
        table, width = self._table, self._table.shape[1]
        if not prompt.text or len(prompt.text) != len(prompt.codec):
            raise ValueError(f"a prompt of {len(prompt.text)} text ids and {len(prompt.codec)} codec ids")
        _check_ids("text", prompt.text, NONE, len(table))
        _check_ids("codec", prompt.codec, FRAME, self.config.vocab_size)
        text, codec = torch.tensor(prompt.text), torch.tensor(prompt.codec)
        rows = table.new_zeros(len(text), width)
        rows[text >= 0] = table[text[text >= 0]]
        rows[codec >= 0] += self._codec_table[codec[codec >= 0]]
        is_vector, is_frame = codec == VECTOR, codec == FRAME
        if is_vector.any():
            rows[is_vector] += _values(prompt.vector, torch.float32, (1, width)).to(rows.dtype)
        if is_frame.any():
            frames = _values(prompt.frames, torch.int16, (int(is_frame.sum()), 1 + self.num_predicted))
            rows[is_frame] += self._summed(frames.long()).to(rows.dtype)
        return rows

    def _summed(self, frames: torch.Tensor) -> torch.Tensor:
        """The sums of the embeddings of all codes of each frame: float32 `[num_frames, hidden_size]`. Waits
        for the running step, as most tables, 126 MB in 1.7B, are on the device alone."""
        tables = self.code_predictor.codec_embedding
        _check_ids("code", (int(frames.min()), int(frames.max())), 0, tables.shape[1])
        predicted = self.embed_predicted(frames[:, 1:].to(tables.device))
        return self._codec_table[frames[:, 0]].float() + predicted.cpu()


def _check_ids(kind: str, ids: Sequence[int], first: int, end: int) -> None:
    for value in (min(ids), max(ids)):
        if not first <= value < end:
            raise ValueError(f"{kind} id {value} of a prompt is not between {first} and {end - 1}")


def _values(data: bytes, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
    if len(data) != dtype.itemsize * shape[0] * shape[1]:
        raise ValueError(f"a prompt with {len(data)} bytes for {list(shape)} values of {dtype}")
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
