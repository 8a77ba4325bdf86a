"""A process that runs the pipeline until it is killed; prints `ready`. Used by test_queues."""

import sys
import time
from pathlib import Path

from tests.integration.live import LiveOmni, demo_config

if __name__ == "__main__":
    LiveOmni(Path(sys.argv[1]), demo_config())
    print("ready", flush=True)
    time.sleep(600)
