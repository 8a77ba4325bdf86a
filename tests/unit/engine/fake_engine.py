"""Processes that greet their server as vLLM's engine core does, and then do as they are told."""

import multiprocessing
import os
import time

import msgspec
import zmq

IDENTITY = (0).to_bytes(2, "little")


def become_ready(handshake_address: str) -> None:
    """Greets, learns its client's address, greets the client, says that it is ready, and lives on."""
    _become_ready(handshake_address)
    time.sleep(600)


def become_ready_and_fail(handshake_address: str) -> None:
    """Its client never hears of it."""
    with zmq.Context() as context:
        handshake = context.socket(zmq.DEALER)
        handshake.identity = IDENTITY
        handshake.connect(handshake_address)
        _say(handshake, "HELLO")
        handshake.recv()
        _say(handshake, "READY")
        handshake.close(linger=1000)
    os._exit(3)


def _become_ready(handshake_address: str) -> None:
    with zmq.Context() as context:
        handshake, client = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for socket in (handshake, client):
            socket.identity = IDENTITY
        handshake.connect(handshake_address)
        _say(handshake, "HELLO")
        metadata = msgspec.msgpack.decode(handshake.recv())
        client.connect(metadata["addresses"]["inputs"][0])
        client.send(b"")
        _say(handshake, "READY")
        for socket in (handshake, client):
            socket.close(linger=1000)


def never_become_ready(handshake_address: str) -> None:
    with zmq.Context() as context:
        handshake = context.socket(zmq.DEALER)
        handshake.identity = IDENTITY
        handshake.connect(handshake_address)
        _say(handshake, "HELLO")
        time.sleep(600)


def hold_a_semaphore(handshake_address: str) -> None:
    """As torch and tqdm make some while an engine starts."""
    lock = multiprocessing.get_context("spawn").Lock()
    with lock:
        never_become_ready(handshake_address)


def _say(socket: "zmq.Socket[bytes]", status: str) -> None:
    socket.send(msgspec.msgpack.encode({"status": status, "local": True, "headless": False}))
