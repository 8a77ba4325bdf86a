"""One streamed answer as it arrives."""

from dataclasses import dataclass, field

from omni_server.client.stream import SAMPLE_RATE_HZ, Chunk


@dataclass
class Received:
    """The answer so far. Times are in seconds since the question was sent, None until they are known."""

    text: str = ""
    audio: bytearray = field(default_factory=bytearray)
    finish_reason: str | None = None
    first_text_s: float | None = None
    first_audio_s: float | None = None
    last_s: float = 0.0

    @property
    def seconds_of_speech(self) -> float:
        return len(self.audio) / 2 / SAMPLE_RATE_HZ

    def add(self, chunk: Chunk, at_s: float) -> None:
        """Raises `StreamError` for audio that is not base64."""
        self.last_s = at_s
        self.finish_reason = chunk.finish_reason or self.finish_reason
        if chunk.text and self.first_text_s is None:
            self.first_text_s = at_s
        if chunk.samples and self.first_audio_s is None:
            self.first_audio_s = at_s
        self.text += chunk.text
        self.audio += chunk.samples

    def summary(self) -> str:
        """Returns its times: `first text 0.12 s, first audio 0.34 s, 4.10 s of speech in 1.02 s`."""
        parts = [] if self.text or self.audio else ["nothing was said"]
        if self.first_text_s is not None:
            parts.append(f"first text {self.first_text_s:.2f} s")
        if self.first_audio_s is not None:
            parts.append(f"first audio {self.first_audio_s:.2f} s")
            parts.append(f"{self.seconds_of_speech:.2f} s of speech in {self.last_s:.2f} s")
        else:
            parts.append(f"complete after {self.last_s:.2f} s")
        if self.finish_reason == "length":
            parts.append("cut off at the longest length")
        return ", ".join(parts)
