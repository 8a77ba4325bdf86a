"""Which pipeline gets a request in Ray Serve."""

import random

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from omni_server.cli.ray.options import IS_READY


class LessBusyOfTwo(FIFOMixin, RequestRouter):
    """The one with fewer running requests of two that are chosen at random, on whatever machines they are. A
    pipeline that restarts a stage is left out, unless all do: it refuses requests at once, and so would seem
    to have nothing to do.

    Ray Serve's own router prefers the machine of the proxy. All that comes through one proxy would go to the
    pipeline there, whatever its load is, and one that autoscaling adds elsewhere would get nothing.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns one group; Ray Serve takes the member with the fewest requests that is not full."""
        ready = [replica for replica in candidate_replicas if replica.routing_stats.get(IS_READY, True)]
        candidates = ready or candidate_replicas
        return [random.sample(candidates, min(2, len(candidates)))]
