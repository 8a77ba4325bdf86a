"""Names of the HTTP server's metrics."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_server.api.server_metrics import ServerMetrics


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("omni_answers_dropped_total", "omni_slow_client_disconnects_total"),
        ("omni_queue_depth", "omni_requests_in_flight"),
        ("omni_queue_limit", "omni_requests_in_flight_limit"),
        ("omni_request_seconds", "omni_e2e_request_latency_seconds"),
        ("omni_time_to_first_text_seconds", "omni_time_to_first_token_seconds"),
    ],
)
def test_a_renamed_metric_is_exported_under_both_names(old: str, new: str) -> None:
    metrics = ServerMetrics("0.1.0")
    metrics.answers_dropped.inc(2)
    metrics.in_flight.set(3)
    metrics.limit.set(4)
    metrics._seconds.labels("speech").observe(0.7)
    metrics._first_text.observe(0.02)

    samples: dict[str, list[tuple[str, dict[str, str], float]]] = {old: [], new: []}
    types = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for name in (old, new):
            if family.name == name.removesuffix("_total"):
                types[name] = family.type
                samples[name] = [
                    (sample.name.removeprefix(family.name), sample.labels, sample.value)
                    for sample in family.samples
                ]
    assert samples[new]
    assert any(value for _, _, value in samples[new])
    assert samples[old] == samples[new]
    assert types[old] == types[new]
