"""The server's end of `omni-server replicas`."""

import asyncio
import os
from typing import Self

import msgspec

from omni_server.engine.cancellation import cancel_and_wait
from omni_server.errors import ReplacementError
from omni_server.omni import AsyncOmni
from omni_server.protocol.replica_control import (
    SOCKET_NAME,
    Answer,
    ListReplicas,
    NotReplaced,
    Replaced,
    Replicas,
    decode_question,
    encode,
)


class ReplicaSocket:
    """Answers on a socket in the server's private folder, from `open` to `close`."""

    def __init__(self, omni: AsyncOmni) -> None:
        self._omni = omni
        self._answering: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, omni: AsyncOmni) -> Self:
        """Raises `OSError`."""
        opened = cls(omni)
        opened._server = await asyncio.start_unix_server(opened._connected, omni.folder / SOCKET_NAME)
        return opened

    async def close(self) -> None:
        """Gives up a replacement that has not been finished."""
        assert self._server is not None
        self._server.close()
        await cancel_and_wait(*self._answering)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A replacement goes on if the client disconnects."""
        try:
            answer = await self._answer(await reader.readline())
            writer.write(encode(answer))
            await writer.drain()
        except ConnectionError:
            return  # the client does not wait for the answer
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> Answer:
        try:
            question = decode_question(line)
        except msgspec.DecodeError as error:
            return NotReplaced(f"the server does not understand the command: {error}")
        omni = self._omni
        if isinstance(question, ListReplicas):
            return Replicas(os.getpid(), omni.model_info.name, omni.replicas())
        try:
            pid = await omni.replace(question.replica, question.timeout_s)
        except ReplacementError as error:
            return NotReplaced(str(error))
        return Replaced(pid)
