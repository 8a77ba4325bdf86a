"""The reference: qwen-tts, decoding greedily but forced along this server's answer.

It is called below its wrapper, which would load another tokenizer for a local folder than for a model of the
hub (`fix_mistral_regex`) and decode 300 frames at a time, of which all but the first few see too little.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
from transformers import MimiConfig, Qwen2Tokenizer

from omni_server.protocol.reference import ReferenceAnswer, ReferenceJob
from stages.qwen_codec.forced_frames import ForcedFrames

# qwen-tts reads it of every model; transformers keeps it in `rope_parameters`.
MimiConfig.rope_theta = 10_000.0


class Qwen3TTSReference:
    """Implements `omni_server.protocol.reference.Reference`."""

    def __init__(self, folder: Path, *, device: str, dtype: str) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._tokenizer: Any = Qwen2Tokenizer.from_pretrained(folder, fix_mistral_regex=False)
        self._model: Any = Qwen3TTSForConditionalGeneration.from_pretrained(
            folder,
            config=Qwen3TTSConfig.from_pretrained(folder),
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
        )
        self._model.eval().to(device)
        self._decoder: Any = self._model.speech_tokenizer.model.decoder.float().to(device)

    @torch.inference_mode()
    def answer(self, job: ReferenceJob) -> ReferenceAnswer:
        """Raises what qwen-tts raises."""
        talker = self._model.talker
        frames = ForcedFrames(talker, job)
        generate, prompt_tokens = talker.generate, 0

        def forced(**kwargs: Any) -> Any:
            nonlocal prompt_tokens
            rows, following = kwargs["inputs_embeds"], kwargs["trailing_text_hidden"]
            prompt_tokens = rows.shape[1] + following.shape[1] - 1
            return generate(**kwargs | forcing | {"min_new_tokens": 0})

        with frames.along() as forcing:
            talker.generate = forced
            try:
                self._generate(job)
            finally:
                talker.generate = generate
        codes = torch.tensor(job.codes, device=self._model.device).view(-1, talker.config.num_code_groups)
        return ReferenceAnswer(
            prompt_tokens=prompt_tokens,
            text=(),
            given_ids=(),  # they are in the prompt
            codes=frames.differences,
            waveform=self._decoder(codes.T[None])[0, 0].cpu().numpy(),
        )

    def _generate(self, job: ReferenceJob) -> None:
        assert job.voice is not None
        clone, speaker = None, job.voice.lower()
        if job.clone is not None:
            vector = torch.from_numpy(np.frombuffer(job.clone.vector, np.float32).copy())
            clone = {
                "ref_code": [None],
                "ref_spk_embedding": [vector],
                "x_vector_only_mode": [True],
                "icl_mode": [False],
            }
        turn = f"<|im_start|>assistant\n{job.given_text}<|im_end|>\n<|im_start|>assistant\n"
        self._model.generate(
            input_ids=[self._tokenizer(turn, return_tensors="pt")["input_ids"].to(self._model.device)],
            instruct_ids=[None],
            ref_ids=[None],
            voice_clone_prompt=clone,
            languages=["auto"],
            speakers=[speaker if speaker in self._model.config.talker_config.spk_id else None],
            non_streaming_mode=clone is None,
            do_sample=False,
            subtalker_dosample=False,
        )
