"""The process that engines are forked from. It has imported vLLM, used no device, and has one thread.

Importing vLLM takes seconds of a core. A forked engine starts without them, even after a crash, and shares
the memory of the imports. Python's own fork server (`multiprocessing.forkserver`) does the work; this module
decides where its process comes from. A program with one thread, such as `omni-server serve`, forks it from
itself (`fork_from_here`), so that server and engines import once. For other programs Python starts a new
interpreter, which imports again (`start`).
"""

import atexit
import gc
import importlib
import logging
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess

from omni_server.engine.environment import VISIBLE_DEVICES
from omni_server.engine.process_files import TempFolder
from omni_server.family import ModelFamily
from omni_server.platform.native_stderr import real_stderr

logger = logging.getLogger(__name__)

ENGINE_NAME = "EngineCore"
"""Name of an engine's process, as vLLM calls it."""

_PREPARATION = "omni_server.engine.fork_server_process"

KILL_TIMEOUT_S = 5.0
"""Time for engines to disappear after SIGKILL when the program ends."""


_forked: tuple[int, TempFolder] | None = None
"""Process id and folder of the fork server that is a copy of this process."""

_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "omni_server.engine.engine_main",
    "stages.runtime.stage_worker",
    "stages.runtime.stage_scheduler",
    "stages.runtime.batching_delay",
)
"""Modules that the engines of all families import; loaded by name, as vLLM loads our classes."""


def import_engine_modules(family: ModelFamily) -> None:
    """Imports what engines of `family` need; takes seconds. The environment for vLLM must already be set."""
    # Imports create a million objects that stay; scanning them again and again takes two of eight seconds.
    # Later collections skip these objects: their pages stay shared with the engines, and a full collection in
    # a ready server takes 13 to 65 ms on busy cores, instead of about 400. Objects created after the imports
    # are not frozen, because the client of a dead engine must be collected.
    gc.disable()
    try:
        for module in _modules(family):
            importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


# Triton reports every object that is still frozen when the interpreter ends, as leaked, in 30 lines.
atexit.register(gc.unfreeze)


def fork_from_here(family: ModelFamily) -> None:
    """Makes a copy of this process the fork server, after `import_engine_modules`.

    A process with more than one Python thread is not forked, because a lock that another thread holds would
    stay locked in the copy. Instead a new interpreter starts, as with `start`. Threads that libraries start
    on import are no obstacle: with NVML's, which torch starts by counting GPUs, and with that of pyarrow's
    jemalloc, a copy uses CUDA as if they had not existed (seen on an H200 with driver 580).
    """
    if not _can_fork():
        return
    if threading.active_count() > 1:
        logger.info(
            "this process has threads: engines are forked from a new interpreter, which imports vLLM again"
        )
        start(family)
        return
    folder = TempFolder()  # removed by the fork server, which outlives this process by a moment
    address = str(folder.path / "fork-server")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        is_alive, alive = os.pipe()  # readable when all processes that may ask for engines have ended
        pid = os.fork()
        if pid == 0:
            os.close(alive)
            _serve(listener, is_alive, folder)
    os.close(is_alive)
    global _forked
    _forked = pid, folder
    _preload(family)  # for the one that Python starts if this one dies
    # The standard library has no public way to adopt a fork server that it did not start.
    vars(forkserver._forkserver).update(  # type: ignore[attr-defined]
        _forkserver_address=address, _forkserver_alive_fd=alive, _forkserver_pid=pid
    )


def start(family: ModelFamily) -> None:
    """Makes Python start the fork server unless it is running. It imports in parallel with this process."""
    if not _can_fork():
        return
    _preload(family)
    with real_stderr():
        forkserver.ensure_running()


def start_process(run: Callable[..., None], *arguments: object) -> BaseProcess:
    """Starts a forked child that runs `run(*arguments)`. Blocks while the fork server imports.

    Raises `OSError` or `EOFError` if the fork server has ended.
    """
    if _can_fork():
        with real_stderr():
            forkserver.ensure_running()
        process: BaseProcess = multiprocessing.get_context("forkserver").Process(
            target=run, args=arguments, name=ENGINE_NAME
        )
        process.start()
        return process
    process = multiprocessing.get_context("spawn").Process(target=run, args=arguments, name=ENGINE_NAME)
    with real_stderr():
        process.start()
    return process


@atexit.register
def _kill_engines() -> None:
    """Ends the engines of a program that exits without closing its `Omni`.

    multiprocessing would wait for them while they wait for this process. Its own exit function was registered
    earlier, so it runs later. It would wait forever for an engine that survives SIGKILL because a device does
    not answer.
    """
    engines = [child for child in multiprocessing.active_children() if child.name == ENGINE_NAME]
    for engine in engines:
        engine.kill()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    for engine in engines:
        engine.join(max(0.0, deadline - time.monotonic()))
        if engine.is_alive():
            vars(multiprocessing.process)["_children"].discard(engine)
    running = vars(forkserver._forkserver)["_forkserver_pid"]  # type: ignore[attr-defined]
    if _forked is not None and _forked[0] != running:  # it was killed, and another took its place
        _forked[1].remove()


def _serve(listener: socket.socket, is_alive: int, folder: TempFolder) -> None:
    importlib.import_module(_PREPARATION)
    try:
        forkserver.main(listener.detach(), is_alive, [])
    finally:
        # Only in the fork server itself: the standard library ends the children with `os._exit`, too.
        folder.remove()
        os._exit(0)


def _preload(family: ModelFamily) -> None:
    multiprocessing.set_forkserver_preload([_PREPARATION, *_modules(family)])


def _can_fork() -> bool:
    """Whether engines can be forked. torch counts the instances of a partitioned GPU through the CUDA driver,
    which forked processes cannot use afterwards. Engines are new interpreters then."""
    return not os.environ.get(VISIBLE_DEVICES, "").startswith("MIG-")


def _modules(family: ModelFamily) -> Sequence[str]:
    return (*_MODULES, *family.engine_modules)
