"""A server without a key on loopback: no web site may make itself its name."""

import pytest

from omni_server.api.access import is_loopback
from omni_server.api.config import ApiConfig, CorsRules
from tests.unit.api.clients import URL, app_of, chat, error_of, http_client
from tests.unit.api.fake_generator import FakeGenerator
from tests.unit.api.test_auth import KEY, WebSocketCall, bearer

PROXIED = ApiConfig(cors=CorsRules(allowed_origins=("https://chat.example:8443", "null")))


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8091", "127.0.0.1:8091", "[::1]:8091", "[::1]", "10.0.0.7"]
)
async def test_own_names_and_addresses_are_served(host: str) -> None:
    async with http_client(app_of(FakeGenerator()), headers={"Host": host}) as client:
        assert (await client.post(URL, json=chat())).status_code == 200
    assert (await WebSocketCall({"host": host}).run(ApiConfig())).status == 101


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8091", "localhost.evil.example", "127.0.0.1.evil.example", "[", ""]
)
async def test_other_names_are_refused_though_origin_agrees(host: str) -> None:
    generator = FakeGenerator()
    headers = {"Host": host, "Origin": f"http://{host}"}
    async with http_client(app_of(generator), headers=headers) as client:
        for response in (
            await client.post(URL, json=chat()),
            await client.get("/"),
            await client.get("/health"),
        ):
            error = error_of(response, 403)
            assert (error["type"], error["code"]) == ("permission_error", "host_not_allowed")
    assert generator.requests == []
    call = await WebSocketCall({"host": host, "origin": f"http://{host}"}).run(ApiConfig())
    assert call.status == 403
    assert call.error()["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("host", "status"), [("chat.example", 200), ("chat.example:8091", 200), ("x.example", 403)]
)
async def test_hosts_of_allowed_origins_are_names_too(host: str, status: int) -> None:
    async with http_client(app_of(FakeGenerator(), PROXIED), headers={"Host": host}) as client:
        assert (await client.get("/v1/models")).status_code == status


@pytest.mark.parametrize(
    "config",
    [
        ApiConfig(api_keys=(KEY,)),
        ApiConfig(host="0.0.0.0"),
        ApiConfig(uds="/run/omni.sock"),
        ApiConfig(cors=CorsRules(allowed_origins=("*",))),
    ],
)
async def test_keys_networks_unix_sockets_and_openness_to_all_need_no_name(config: ApiConfig) -> None:
    async with http_client(
        app_of(FakeGenerator(), config), headers={"Host": "omni.example"} | bearer(KEY)
    ) as client:
        assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("", False),
    ],
)
def test_addresses_of_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected
