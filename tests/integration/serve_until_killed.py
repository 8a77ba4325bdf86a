"""Runs the pipeline until it is killed; prints the engines' process ids when it is ready. Used by
test_queues."""

import sys
import time
from pathlib import Path

from tests.integration.live import LiveOmni, demo_config

if __name__ == "__main__":
    live = LiveOmni(Path(sys.argv[1]), demo_config())
    sys.stdout.write(" ".join(map(str, live.omni.engine_pids().values())) + "\n")
    sys.stdout.flush()
    time.sleep(600)
