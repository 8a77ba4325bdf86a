"""The pipeline of `omni-server serve`, and of a replica in Ray Serve, from its options to its end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from omni_server.check.default_config import resolve_deployment
from omni_server.cli.model_flags import speaking_demo
from omni_server.cli.serve_flags import ServeOptions
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError

if TYPE_CHECKING:  # imported when the engines start
    from omni_server.omni import AsyncOmni

Progress = Callable[[str], None]


def prepare(
    options: ServeOptions, on_progress: Progress, stage_config: StageConfig | None = None
) -> tuple[Path, StageConfig]:
    """Returns the checkpoint's folder, downloaded if necessary, and the config: `stage_config`, or the one
    that the options name or let make.

    Raises `ConfigError`.
    """
    model_dir, config = resolve_deployment(
        options.model or str(speaking_demo()),
        stage_config or options.stage_config,
        speech_model=options.speech_model,
        use_cpu=options.use_cpu,
        flags=options.stage_flags,
        revision=options.revision,
        load_format=options.load_format,
        on_progress=on_progress,
    )
    if options.request_timeout_s is not None:
        config = config.model_copy(update={"request_timeout_s": options.request_timeout_s})
    return model_dir, config


@asynccontextmanager
async def running(
    options: ServeOptions, model_dir: Path, config: StageConfig, on_progress: Progress
) -> "AsyncIterator[AsyncOmni]":
    """Runs the engines inside the block, and answers `omni-server replicas`.

    Raises a `ConfigError` that explains why the engines cannot start.
    """
    from omni_server.check.files import explained
    from omni_server.cli.replica_socket import ReplicaSocket
    from omni_server.omni import AsyncOmni

    try:
        omni = await AsyncOmni.start(
            model_dir,
            config,
            served_model_names=options.served_model_names,
            load_format=options.load_format,
            on_progress=on_progress,
        )
    except ConfigError as error:
        raise await asyncio.to_thread(
            explained, error, model_dir, config, load_format=options.load_format
        ) from error
    try:
        replicas = await ReplicaSocket.open(omni)
        try:
            yield omni
        finally:
            await replicas.close()
    finally:
        await omni.stop()
