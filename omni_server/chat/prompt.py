"""Questions that a person types, with commands between them."""

import shlex
import sys
from pathlib import Path

from omni_server.chat.media import MediaKind, media_part
from omni_server.chat.session import Chat, tell
from omni_server.errors import ConfigError

HELP = """\
A line is a question. Ctrl-C stops an answer; Ctrl-C at the prompt, Ctrl-D or /quit ends.
  /audio FILE, /image FILE, /video FILE   goes with the next question; an empty line sends it alone
  /voice NAME                             another voice
  /new                                    forget what has been said
  /help                                   this"""

_MEDIA: dict[str, MediaKind] = {"/audio": "audio", "/image": "image", "/video": "video"}


def talk(chat: Chat) -> int:
    """Until the person ends it; 0, or 130 after Ctrl-C at the prompt."""
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
            _obey(chat, line)
        elif line or chat.attached:
            try:
                chat.answer(line)
            except KeyboardInterrupt:
                continue  # the answer has stopped; the conversation goes on


def _obey(chat: Chat, line: str) -> None:
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
        case "/voice", [name] if chat.conversation.asked.voice is not None:
            chat.conversation.use_voice(name)
        case "/new", []:
            chat.conversation.forget()
            chat.attached.clear()
        case "/help", []:
            tell(HELP)
        case _:
            tell(f"'{line}' is no command; /help lists them")
