"""Rows O02 and O03: the end of the server. In the last file of the folder, since the next row would need a
new one."""

import httpx2

from tests.integration.checklist.guarded import KEY
from tests.integration.server_process import ServerProcess, wait_until
from tests.integration.test_server import spoken, written
from tests.unit.api.clients import URL, error_of
from tests.unit.api.sse_validator import read_stream


def test_o02_o03_sigterm_lets_a_stream_finish(guarded: ServerProcess) -> None:
    talker = {"temperature": 0, "min_tokens": 600, "max_tokens": 600}
    body = spoken(stage_sampling={"talker": talker}, stream=True)
    headers = {"Authorization": f"Bearer {KEY}"}
    with guarded.client() as client, client.stream("POST", URL, json=body, headers=headers) as response:
        lines = response.iter_lines()
        received = []
        for line in lines:
            received.append(line)
            if '"data":' in line:
                break
        guarded.process.terminate()
        with httpx2.Client(base_url=guarded.url, headers=headers, timeout=60) as other:
            wait_until(lambda: other.get("/ready").status_code == 503, 30)
            assert error_of(other.get("/ready"), 503)["code"] == "server_shutting_down"
            assert error_of(other.post(URL, json=written()), 503)["code"] == "server_shutting_down"
        received += lines
    answer = read_stream("\n".join(received) + "\n")
    assert len(answer.data) == 600 * 480 * 2
    assert guarded.process.wait(60) == 0
