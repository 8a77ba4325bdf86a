"""The text of one request, on its way to the talker."""

from collections.abc import Sequence

from omni_server.family.speech_text import SpeechPrompt
from stages.qwen3_tts.checkpoint_config import CheckpointConfig
from stages.qwen3_tts.layout import Speaking, speech_prompt
from stages.qwen3_tts.tokens import TextStream, TextToken, TextTokenizer

_ROLE = "<|im_start|>assistant\n"
_SPARE_FRAMES, _MAX_FRAMES_PER_TOKEN = 50, 25
"""Limits speech that misses its end, as about one of 200 to 300 does (Qwen3-TTS#118, sglang-omni#1179). A
token of text takes three to four frames on average."""


class Qwen3TTSText:
    """Implements `omni_server.family.speech_text.SpeechText`.

    The role's line is tokenized on its own. The reference tokenizes both as one string, so white space with
    a line break at the beginning of the text becomes one token with the role's own.
    """

    def __init__(self, config: CheckpointConfig, tokenizer: TextTokenizer, speaking: Speaking) -> None:
        self._config = config
        self._role_ids = tokenizer.template_ids(_ROLE)
        self._speaking = speaking
        self._stream = TextStream(tokenizer)
        self._ids: tuple[int, ...] = ()
        self.token_texts: list[str] = []
        self._num_taken = 0
        self._is_complete = False

    def push(self, text: str) -> None:
        self._add(self._stream.push(text))

    def flush(self) -> None:
        self._add(self._stream.finish())

    def finish(self) -> None:
        self.flush()
        self._is_complete = True

    def _add(self, tokens: Sequence[TextToken]) -> None:
        self._ids += tuple(token.id for token in tokens)
        self.token_texts += [token.text for token in tokens]

    @property
    def max_tokens(self) -> int:
        return _SPARE_FRAMES + _MAX_FRAMES_PER_TOKEN * (self._num_taken + len(self._ids))

    def prompt(self) -> SpeechPrompt | None:
        is_enough = self._is_complete or self._speaking.has_enough(len(self._ids))
        if not self._ids or not is_enough:
            return None
        return speech_prompt(
            self._config, self._role_ids, self._speaking, self.take_ids(), is_complete=self._is_complete
        )

    def take_ids(self) -> tuple[int, ...]:
        taken, self._ids = self._ids, ()
        self._num_taken += len(taken)
        return taken
