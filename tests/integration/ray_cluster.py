"""A program that runs a Ray cluster of one node: prints its address, and ends it when its standard input ends.

`ray stop` would end every Ray cluster of this machine.
"""

import os
import sys

os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    # A machine that is busy with other tests takes half a minute.
    RAY_raylet_start_wait_time_s="180",
    RAY_gcs_server_request_timeout_seconds="120",
)

import ray
from ray import serve
from ray.cluster_utils import Cluster

cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 8, "object_store_memory": 200 * 2**20, "include_dashboard": False},
)
sys.stdout.write(f"{cluster.address}\n")
sys.stdout.flush()
sys.stdin.read()
ray.init(cluster.address, log_to_driver=False)
serve.shutdown()
ray.shutdown()
cluster.shutdown()
