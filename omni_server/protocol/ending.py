"""How a server tells its engines that SIGTERM means them.

Whoever stops a service sends SIGTERM to all of its processes (systemd's KillMode=control-group, its default). The
server then drains what runs, for which it needs the engines, and ends them afterwards, with SIGTERM as well. So they
take no notice of one unless this file is in their folder for temporary files, which is the server's own.
"""

from pathlib import Path

_NAME = "ending"


def ending_marker(folder: Path) -> Path:
    """The file in `folder`, the engines' TMPDIR."""
    return folder / _NAME
