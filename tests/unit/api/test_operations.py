"""Rows E and O of the conformance checklist (errors, headers, operations), and where each is shown.

E01  unknown URLs are 404 in the envelope        test_errors.py::test_unknown_url
E02  wrong method is 405 with Allow              test_errors.py::test_wrong_method_says_what_is_allowed
E03  a body that is not JSON is 400              test_bad_requests.py::test_body_that_is_not_json_is_refused
E04  other content types are 400                 test_bad_requests.py::test_other_content_types_are_refused
E05  body over the limit is 413, both ways       test_limits.py::test_body_above_the_limit_is_413_whichever_way_it_is_sent
E05  ... and the connection goes on              test_server.py::test_body_above_the_limit_is_refused_and_the_server_goes_on
E06  no, wrong, odd key is 401                   test_auth.py::test_without_a_known_key_there_is_401
E07  probes and /metrics need no key             test_auth.py::test_probes_and_metrics_need_no_key
E07  ... nor do preflights                       test_cors.py::test_preflight_of_an_allowed_site_passes_without_a_key
E08  x-request-id echoed                         test_errors.py::test_well_formed_request_id_is_echoed
E08  ... or replaced                             test_errors.py::test_other_request_ids_are_replaced
E09  x-request-id on everything                  test_operations.py::test_every_response_has_a_request_id
E10  overload is 503 with Retry-After            test_limits.py::test_full_server_refuses_with_503_and_a_time_to_come_back
E10  ... or 429 for one key                      test_limits.py::test_one_key_cannot_take_the_places_of_others
E11  an unforeseen failure tells nothing         test_errors.py::test_failure_has_its_status_and_retry_advice
E12  CORS from allowed sites                     test_cors.py::test_every_answer_to_an_allowed_site_can_be_read_by_it
E12  ... and from others                         test_cors.py::test_preflight_of_another_site_is_refused
E13  nesting, huge numbers, NaN, surrogates      test_bad_requests.py::test_body_that_is_not_json_is_refused
E14  slow uploads do not block probes            test_operations.py::test_stalled_connections_do_not_block_probes
O01  /health before and after loading            test_server.py::test_probes_are_answered_while_the_model_loads
O01  ... has no body                             test_models_and_probes.py::test_health_has_no_body
O01  ... and when an engine has died             test_server.py::test_dead_engine_ends_streams_with_an_error_and_the_server_with_one
O02  /ready while draining is 503                test_models_and_probes.py::test_probes_follow_the_life_of_the_server
O03  SIGTERM lets streams finish                 test_server.py::test_running_stream_is_finished_while_new_requests_are_refused
O04  /metrics parses, counts, returns to 0       test_metrics.py::test_answer_by_voice_is_counted
O04  ... with engines                            ../../integration/test_operations.py::test_spoken_answer_is_counted_exactly_in_every_stage
O05  /version                                    test_models_and_probes.py::test_version
O05  /load                                       test_limits.py::test_full_server_refuses_with_503_and_a_time_to_come_back
O06  /openapi.json is valid OpenAPI 3.1          test_operations.py::test_description_is_valid_openapi
O06  ... and lists errors and event streams      test_models_and_probes.py::test_description_declares_the_envelope_on_every_operation
O07  /docs without external requests             not so: FastAPI's pages load Swagger UI and ReDoc from a CDN, and to carry
                                                 them along would be 2 MB of scripts for a page that developers see. /openapi.json
                                                 is complete without them; --disable-fastapi-docs takes all three away.
O08  port in use ends the start at once          test_server.py::test_port_in_use_is_found_before_the_model_loads
O09  wrong model path ends it with a message     ../cli/test_serve.py::test_a_missing_model_folder_exits_with_2_and_one_line
O10  log: request id, no base64, no key          test_request_log.py::test_nothing_that_was_said_or_sent_is_in_the_log_at_any_level
O10  ... with engines                            ../../integration/test_operations.py::test_log_has_one_line_for_each_request_and_nothing_of_what_was_said
"""  # noqa: E501 - a table

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from omni_server.api.config import ApiConfig
from tests.unit.api.clients import URL, app_of, chat, http_client
from tests.unit.api.fake_generator import FakeGenerator
from tests.unit.api.test_auth import KEY, bearer
from tests.unit.api.test_server import Life, client_of, served

_ROW = re.compile(r"^([EO]\d\d)  .*?(?:\s(\S+\.py)::(\w+)|not so: .*)$", re.MULTILINE)
ROWS = _ROW.findall(__doc__ or "")


def test_every_row_of_the_checklist_is_here() -> None:
    rows = [f"E{number:02}" for number in range(1, 15)] + [f"O{number:02}" for number in range(1, 11)]
    assert sorted({row for row, _, _ in ROWS}) == rows


@pytest.mark.parametrize(("file", "name"), [(file, name) for _, file, name in ROWS if name])
def test_every_test_in_the_table_exists(file: str, name: str) -> None:
    assert f"def {name}(" in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize(
    ("status", "method", "path"),
    [
        (200, "GET", "/health"),
        (200, "GET", "/metrics"),
        (200, "POST", URL),
        (400, "POST", URL),
        (401, "GET", "/v1/models"),
        (404, "GET", "/nope"),
        (405, "GET", URL),
        (413, "POST", URL),
        (500, "POST", URL),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_every_response_has_a_request_id(status: int, method: str, path: str, stream: bool) -> None:
    generator = FakeGenerator()
    if status == 500:
        generator.submit_error = RuntimeError("odd")
    body = {400: chat(None), 413: chat("x" * 3000)}.get(status, chat(stream=stream)) if method == "POST" else None
    headers = {"X-Request-Id": "mine"} | ({} if status == 401 else bearer(KEY))
    async with http_client(app_of(generator, ApiConfig(api_keys=(KEY,), max_body_bytes=2000))) as client:
        response = await client.request(method, path, json=body, headers=headers)
    assert response.status_code == status
    assert response.headers.get_list("x-request-id") == ["mine"]
    is_stream = response.headers["content-type"].startswith("text/event-stream") if response.content else False
    assert ("openai-processing-ms" in response.headers) == (not is_stream)
    if not is_stream:
        assert int(response.headers["openai-processing-ms"]) >= 0


async def test_stalled_connections_do_not_block_probes() -> None:
    life = Life()
    async with served(life), AsyncExitStack() as stack:
        port = int(life.address.rpartition(":")[2])
        head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
        for begun in (head.encode(), head.encode() + b"\r\n", head.encode() + b'\r\n{"model":'):
            for _ in range(30):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
                writer.write(begun)
                await writer.drain()
        async with client_of(life.address) as client:
            for path in ("/health", "/ready", "/metrics"):
                assert (await client.get(path)).status_code == 200
            assert (await client.post(URL, json=chat())).status_code == 200


async def test_description_is_valid_openapi() -> None:
    async with http_client(app_of(FakeGenerator())) as client:
        document = (await client.get("/openapi.json")).json()
    assert list(OpenAPIV31SpecValidator(document).iter_errors()) == []
    assert {"/metrics", "/load", "/health", "/ready", "/live", "/version"} <= set(document["paths"])
