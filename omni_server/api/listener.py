"""The socket that the server listens on, opened first to find out early whether its address is free."""

import socket
from contextlib import suppress
from pathlib import Path

from omni_server.api.config import ApiConfig
from omni_server.errors import ConfigError

_BACKLOG = 2048


def listen(config: ApiConfig) -> socket.socket:
    """Opens a listening socket. Raises `ConfigError` if the address is in use or not local."""
    if config.uds is not None:
        return _listen_unix(Path(config.uds))
    if not 0 <= config.port <= 65535:  # the resolver would wrap modulo 65536
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: ports go from 0 to 65535.")
    try:
        found = socket.getaddrinfo(
            config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # Prefers IPv4: clients of "localhost" expect 127.0.0.1.
        family, kind, protocol, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # Of each connection: no acknowledged byte for so long, because the client reads nothing or has
            # gone.
            listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(config.http_send_timeout_s * 1000)
            )
            # Immediately: until then, a second process could bind the same port.
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}. "
            "Choose another --host or --port, or stop the process that uses this one."
        ) from error
    listener.setblocking(False)
    return listener


def check_address(config: ApiConfig) -> None:
    """Raises `ConfigError` as `listen` would."""
    listen(config).close()
    remove_unix_path(config)


def address_of(listener: socket.socket, *, is_tls: bool = False) -> str:
    """The address for clients on this machine: a URL, or `unix:` and the path."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"


def remove_unix_path(config: ApiConfig) -> None:
    if config.uds is not None:
        Path(config.uds).unlink(missing_ok=True)


def _listen_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _is_answered(path):
            path.unlink()  # left by a process that was killed
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on the Unix socket {path}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(ConnectionRefusedError):
        probe.connect(str(path))
        return True
    return False
