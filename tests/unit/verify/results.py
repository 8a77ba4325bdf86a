"""Cases, answers and references for tests of the comparison."""

import numpy as np

from omni_server.protocol.reference import ReferenceAnswer
from omni_server.types import ChatMessage, TextPart
from omni_server.verify.answers import Answer
from omni_server.verify.cases import Case, Prompt
from omni_server.verify.compare import Precision

FLOAT32 = Precision("float32", "float32")
WAVEFORM = np.sin(np.arange(960, dtype=np.float32) / 10)

PROMPT = Prompt("text", (ChatMessage("user", (TextPart("Hello"),)),))
SPOKEN = Case(PROMPT, "Chelsie")
WRITTEN = Case(PROMPT, None)

ANSWER = Answer(
    prompt_tokens=9,
    text_ids=(5, 6, 7),
    codes=(1, 2),
    streamed=WAVEFORM,
    whole=WAVEFORM,
)
REFERENCE = ReferenceAnswer(prompt_tokens=9, text=(), given_ids=None, codes=(), waveform=WAVEFORM)
