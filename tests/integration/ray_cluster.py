"""A program that runs a Ray cluster of two nodes with room for one pipeline each: prints its address, and
ends it when its standard input ends.

Run by root, the second node has a /dev/shm of its own, as another machine has. Otherwise both share one.
`ray stop` would end every Ray cluster of this machine.
"""

import os
import subprocess
import sys
import time

os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    # A machine that is busy with other tests takes half a minute.
    RAY_raylet_start_wait_time_s="180",
    RAY_gcs_server_request_timeout_seconds="120",
    # Ray's default is 15: beside other tests, a pipeline would take five minutes to start.
    RAY_worker_niceness="0",
)

import ray
from ray import serve
from ray.cluster_utils import Cluster

CPUS = 4
"""Of each node: what a pipeline with three engines takes."""
OBJECT_STORE_BYTES = 100 * 2**20

head = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": CPUS, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False},
)
command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={head.address}"]
command += [f"--num-cpus={CPUS}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
command += ["--min-worker-port=0", "--max-worker-port=0"]  # any free one: by default both would take the same
if os.geteuid() == 0:
    private = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", private, "sh", *command]
with subprocess.Popen(command, stdout=sys.stderr) as node:
    ray.init(head.address, log_to_driver=False)
    while sum(known["Alive"] for known in ray.nodes()) < 2:
        assert node.poll() is None, "the second node has ended"
        time.sleep(0.2)
    ray.shutdown()
    sys.stdout.write(f"{head.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    ray.init(head.address, log_to_driver=False)
    serve.shutdown()
    ray.shutdown()
    node.terminate()
head.shutdown()
