"""From the options to the end of a conversation: who is asked, where questions come from, where answers go."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from pydantic import JsonValue

from omni_server.chat.answer import AnswerFailedError, Received, ask
from omni_server.chat.conversation import Asked, Conversation
from omni_server.chat.media import MediaKind, media_part
from omni_server.chat.player import PLAYERS, Player, find_player
from omni_server.chat.recordings import Recordings
from omni_server.client.discover import discover

_READ_BUFFER_BYTES = 2**20
_CLOSING_S = 0.02
"""Connections are closed by the loop, which stands still while the person types: a server would go on with an answer
that was stopped."""
_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Signs that a terminal would obey."""


@dataclass(frozen=True)
class ChatOptions:
    """What the command line asked for."""

    url: str
    """With or without /v1."""
    model: str | None = None
    """None: the first that the server lists."""
    voice: str | None = None
    """None: the first that the server lists."""
    is_text_only: bool = False
    system: str | None = None
    max_tokens: int | None = None
    api_key: str | None = None
    save: Path | None = None
    plays: bool = True
    media: tuple[tuple[MediaKind, Path], ...] = ()
    """Files that go with the first question."""


@dataclass
class Chat:
    """An open conversation. `close` ends it."""

    runner: asyncio.Runner
    http: aiohttp.ClientSession
    url: str
    conversation: Conversation
    player: tuple[str, ...] | None
    recordings: Recordings | None
    attached: list[JsonValue] = field(default_factory=list)
    """Parts that go with the next question."""

    def answer(self, words: str) -> bool:
        """Asks, shows and plays the answer; returns whether there was one, in whole. Ctrl-C stops it: raises
        `KeyboardInterrupt` when all is silent, and keeps what had been said."""
        question: JsonValue = words
        if self.attached:
            question = [*self.attached, {"type": "text", "text": words}] if words else [*self.attached]
        received = Received()
        try:
            self.runner.run(self._answer(question, received))
        except AnswerFailedError as error:
            sys.stdout.write("\n" if received.text else "")
            tell(f"error: {error}")
            return False
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            self._remember(question, received)
            tell("stopped")
            raise
        self._remember(question, received)
        return True

    def close(self) -> None:
        self.runner.run(self.http.close())
        self.runner.close()

    async def _answer(self, question: JsonValue, received: Received) -> None:
        player = Player(self.player, self._give_player_up) if self.player is not None else None
        try:
            async with aclosing(ask(self.http, self.url, self.conversation.body(question), received)) as pieces:
                async for piece in pieces:
                    if piece.text:
                        sys.stdout.write(_shown(piece.text))
                        sys.stdout.flush()
                    if piece.audio and player is not None:
                        await player.write(piece.audio)
            sys.stdout.write("\n")
            sys.stdout.flush()
            saved = self._save(received)
            tell(f"({summary(received)}{saved})")
            if player is not None:
                await player.finish()
        finally:
            if player is not None:
                await player.stop()
            await asyncio.sleep(_CLOSING_S)

    def _save(self, received: Received) -> str:
        if self.recordings is None or not received.audio:
            return ""
        return f", {self.recordings.save(bytes(received.audio))}"

    def _remember(self, question: JsonValue, received: Received) -> None:
        self.attached.clear()
        if received.finish_reason is not None:
            audio_id, expires_at = received.audio_id, received.expires_at
            self.conversation.add(question, received.text, audio_id=audio_id, expires_at=expires_at)
        elif received.text:
            self.conversation.add(question, received.text)

    def _give_player_up(self, reason: str) -> None:
        self.player = None
        tell(f"{reason}; going on without sound, --save DIR keeps answers as files")


def open_chat(options: ChatOptions) -> Chat:
    """Raises `ConfigError` if no server answers, and for files that cannot be sent or written."""
    attached = [media_part(kind, file) for kind, file in options.media]
    recordings = Recordings(options.save) if options.save is not None else None
    runner = asyncio.Runner()
    base_url = options.url.rstrip("/").removesuffix("/v1")
    http = runner.run(_session(options.api_key))
    try:
        served = runner.run(discover(http, base_url, options.model, options.voice))
        listed = served.voices or ((options.voice,) if options.voice is not None else ())
        voice = served.voice if listed and not options.is_text_only else None
        asked = Asked(served.model, voice, options.system, options.max_tokens)
        player = find_player() if voice is not None and options.plays else None
    except BaseException:
        runner.run(http.close())
        runner.close()
        raise
    return Chat(runner, http, f"{base_url}/v1/chat/completions", Conversation(asked), player, recordings, attached)


def describe(chat: Chat, options: ChatOptions) -> str:
    """Who is talked to, and what happens to the sound."""
    asked = chat.conversation.asked
    words = f"{asked.model} at {chat.url.removesuffix('/v1/chat/completions')}"
    if asked.voice is None:
        return words + (", text only" if options.is_text_only else ", which answers in text only")
    words += f", voice {asked.voice}"
    if chat.player is not None:
        words += f", played by {Path(chat.player[0]).name}"
    elif options.plays:
        words += f"; nothing here plays sound (none of {', '.join(PLAYERS)} is installed)"
        words += "" if chat.recordings is not None else ": --save DIR keeps answers as files"
    return words


def summary(received: Received) -> str:
    """Times of an answer: `first text 0.12 s, first audio 0.34 s, 4.10 s of speech in 1.02 s`."""
    parts = [] if received.text or received.audio else ["nothing was said"]
    if received.first_text_s is not None:
        parts.append(f"first text {received.first_text_s:.2f} s")
    if received.first_audio_s is not None:
        parts.append(f"first audio {received.first_audio_s:.2f} s")
        parts.append(f"{received.seconds_of_speech:.2f} s of speech in {received.last_s:.2f} s")
    else:
        parts.append(f"complete after {received.last_s:.2f} s")
    if received.finish_reason == "length":
        parts.append("cut off at the longest length")
    return ", ".join(parts)


def tell(line: str) -> None:
    """To stderr: stdout is for what the model says."""
    sys.stdout.flush()
    sys.stderr.write(_shown(line) + "\n")
    sys.stderr.flush()


def converse(chat: Chat, questions: Callable[[], str | None]) -> int:
    """Until `questions` gives None. 0 if every question was answered, else 1. Ctrl-C ends it."""
    exit_code = 0
    while (words := questions()) is not None:
        if (words or chat.attached) and not chat.answer(words):
            exit_code = 1
    return exit_code


def _shown(text: str) -> str:
    return text.translate(_CONTROL)


async def _session(api_key: str | None) -> aiohttp.ClientSession:
    headers = {"Accept-Encoding": "identity"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    # One connection for each question: a server closes idle ones, which nobody would notice here while the loop stands.
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(headers=headers, read_bufsize=_READ_BUFFER_BYTES, connector=connector)
