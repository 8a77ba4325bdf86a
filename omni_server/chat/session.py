"""A conversation from the options to its end: reads questions, and shows and plays answers."""

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from pydantic import JsonValue

from omni_server.chat.answer import Received
from omni_server.chat.conversation import Conversation, MediaKind, media_part
from omni_server.chat.player import PLAYERS, Player, Recordings, find_player
from omni_server.client.discover import discover
from omni_server.client.stream import StreamError, open_session, stream_chunks
from omni_server.errors import ConfigError

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
"""No total limit: a long answer may take minutes, and a working server sends keep-alive comments."""
_CLOSING_S = 0.02
"""The event loop closes connections, but does not run while the user types. Without this delay, a server
would continue an answer that was stopped."""
_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Characters that would control the terminal."""
_HELP = """\
A line is a question. Ctrl-C stops an answer; Ctrl-C at the prompt, Ctrl-D or /quit ends.
  /audio FILE, /image FILE, /video FILE   goes with the next question; an empty line sends it alone
  /voice NAME                             use another voice
  /new                                    forget what has been said
  /help                                   this"""

_MEDIA: dict[str, MediaKind] = {"/audio": "audio", "/image": "image", "/video": "video"}


@dataclass(frozen=True)
class ChatOptions:
    """Options of the command line."""

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
    """Files to send with the first question."""


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
    """Parts to send with the next question."""

    def answer(self, words: str) -> bool:
        """Asks, shows and plays the answer; returns whether it was complete. Ctrl-C stops it: raises
        `KeyboardInterrupt` when playback has stopped, and keeps the text so far."""
        question: JsonValue = words
        if self.attached:
            question = [*self.attached, {"type": "text", "text": words}] if words else [*self.attached]
        received = Received()
        try:
            self.runner.run(self._answer(question, received))
        except StreamError as error:
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
        player: Player | None = None
        body = json.dumps(self.conversation.body(question)).encode()
        began_s = time.perf_counter()
        try:
            async with aclosing(stream_chunks(self.http, self.url, body, _TIMEOUT)) as chunks:
                async for chunk, arrived_s in chunks:
                    received.add(chunk, arrived_s - began_s)
                    sys.stdout.write(_shown(chunk.text))
                    sys.stdout.flush()
                    if chunk.samples and self.player is not None:
                        player = player or await Player.start(self.player, self._give_up_player)
                        await player.write(chunk.samples)
            sys.stdout.write("\n")
            sys.stdout.flush()
            words = received.summary()
            if self.recordings is not None and received.audio:
                words += f", {self.recordings.save(bytes(received.audio))}"
            tell(f"({words})")
            if player is not None and self.player is not None:
                await player.finish()
        except TimeoutError as error:
            raise StreamError("the server has stopped answering") from error
        finally:
            if player is not None:
                await player.stop()
            await asyncio.sleep(_CLOSING_S)

    def _remember(self, question: JsonValue, received: Received) -> None:
        self.attached.clear()
        if received.text or received.finish_reason is not None:
            self.conversation.add(question, received.text)

    def _give_up_player(self, reason: str) -> None:
        self.player = None
        tell(f"{reason}; going on without audio, --save DIR keeps answers as files")


def open_chat(options: ChatOptions) -> Chat:
    """Raises `ConfigError` if no server answers or a file cannot be read or written."""
    attached = [media_part(kind, file) for kind, file in options.media]
    recordings = Recordings(options.save) if options.save is not None else None
    runner = asyncio.Runner()
    base_url = options.url.rstrip("/").removesuffix("/v1")
    http = runner.run(_open_session(options.api_key))
    try:
        served = runner.run(discover(http, base_url, options.model, options.voice))
        listed = served.voices or ((options.voice,) if options.voice is not None else ())
        voice = served.voice if listed and not options.is_text_only else None
        conversation = Conversation(served.model, voice, options.system, options.max_tokens)
        player = find_player() if voice is not None and options.plays else None
    except BaseException:
        runner.run(http.close())
        runner.close()
        raise
    return Chat(runner, http, f"{base_url}/v1/chat/completions", conversation, player, recordings, attached)


def describe(chat: Chat, options: ChatOptions) -> str:
    """Describes model, server, voice and where the audio goes."""
    words = f"{chat.conversation.model} at {chat.url.removesuffix('/v1/chat/completions')}"
    voice = chat.conversation.voice
    if voice is None:
        return words + (", text only" if options.is_text_only else ", which answers in text only")
    words += f", voice {voice}"
    if chat.player is not None:
        words += f", played by {Path(chat.player[0]).name}"
    elif options.plays:
        words += f"; no audio player is installed (none of {', '.join(PLAYERS)})"
        words += "" if chat.recordings is not None else ": --save DIR keeps answers as files"
    return words


def tell(line: str) -> None:
    """Writes to stderr: stdout is for the model's words."""
    sys.stdout.flush()
    sys.stderr.write(_shown(line) + "\n")
    sys.stderr.flush()


def converse(chat: Chat, questions: Iterable[str]) -> int:
    """Returns 0 if every question was answered, else 1. Ctrl-C ends it."""
    exit_code = 0
    for words in questions:
        if (words or chat.attached) and not chat.answer(words):
            exit_code = 1
    return exit_code


def talk(chat: Chat) -> int:
    """Runs questions and commands from the prompt until the user ends it. Returns 0, or 130 after Ctrl-C
    there."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return 0
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            return 130
        if line == "/quit":
            return 0
        if line.startswith("/"):
            _run_command(chat, line)
        elif line or chat.attached:
            try:
                chat.answer(line)
            except KeyboardInterrupt:
                continue  # the answer has stopped; the conversation continues


def _run_command(chat: Chat, line: str) -> None:
    command, _, rest = line.partition(" ")
    try:
        words = shlex.split(rest)
    except ValueError as error:
        tell(f"{command}: {error}")
        return
    match command, words:
        case (("/audio" | "/image" | "/video"), [file]):
            try:
                chat.attached.append(media_part(_MEDIA[command], Path(file).expanduser()))
            except ConfigError as error:
                tell(f"error: {error}")
        case "/voice", [name] if chat.conversation.voice is not None:
            chat.conversation.voice = name
        case "/new", []:
            chat.conversation.history.clear()
            chat.attached.clear()
        case "/help", []:
            tell(_HELP)
        case _:
            tell(f"'{line}' is not a command; /help lists them")


def _shown(text: str) -> str:
    return text.translate(_CONTROL)


async def _open_session(api_key: str | None) -> aiohttp.ClientSession:
    # One connection per question: servers close idle ones, which this loop would not notice while stopped.
    return open_session(api_key, aiohttp.TCPConnector(force_close=True))
