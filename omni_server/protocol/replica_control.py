"""What `omni-server replicas` asks a running server on its local socket: one line of JSON, and one as the
answer.

The socket is in the server's private folder, so only its user and root can connect.
"""

from typing import Literal

import msgspec

SOCKET_NAME = "replicas.sock"

ReplicaStatus = Literal["up", "draining", "down", "failed"]
"""`draining`: gets no new requests, because it is about to be replaced or is being warmed up. `down`: is
being started again. `failed`: has died too often, and waits until the policy allows another restart."""


class ListReplicas(msgspec.Struct, frozen=True, tag="list"):
    """Answered with `Replicas`."""


class ReplaceReplica(msgspec.Struct, frozen=True, tag="replace"):
    """Answered with `Replaced` or `NotReplaced`, when it is done."""

    replica: str
    """A name of `omni_server.metrics.replica_name`."""
    timeout_s: float | None = None
    """For the requests that it has; None: as long as a request may take."""


class Replica(msgspec.Struct, frozen=True):
    name: str
    pid: int | None
    """Of the engine; None while it is down."""
    num_requests: int
    """Requests that are bound to it."""
    num_restarts: int
    status: ReplicaStatus


class Replicas(msgspec.Struct, frozen=True, tag="replicas"):
    server_pid: int
    model: str
    replicas: tuple[Replica, ...]


class Replaced(msgspec.Struct, frozen=True, tag="replaced"):
    pid: int
    """Of the new engine."""


class NotReplaced(msgspec.Struct, frozen=True, tag="not_replaced"):
    message: str
    """Why."""


Question = ListReplicas | ReplaceReplica
Answer = Replicas | Replaced | NotReplaced

_question_decoder = msgspec.json.Decoder(Question)
_answer_decoder = msgspec.json.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_question(line: bytes) -> Question:
    """Raises `msgspec.DecodeError`."""
    return _question_decoder.decode(line)


def decode_answer(line: bytes) -> Answer:
    """Raises `msgspec.DecodeError`."""
    return _answer_decoder.decode(line)
