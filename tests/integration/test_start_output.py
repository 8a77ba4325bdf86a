"""What a user sees of a start, in an interpreter of its own and without any flag that concerns the model."""

import re
import signal
import subprocess
import sys
from itertools import takewhile

from tests.integration.server_process import ROOT

OWN_LINE = re.compile(r"\[ *\d+\.\d s\] (?P<progress>.*)|\d{4}-\d\d-\d\d [\d:,]+ INFO .*")
END_TIMEOUT_S = 60.0


def test_a_start_prints_lines_of_our_own_only_and_none_twice() -> None:
    command = [sys.executable, "-m", "omni_server.cli.entry", "serve", "--cpu", "--port", "0"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    with server, server.stdout as output:
        try:
            before = [line.rstrip("\n") for line in takewhile(lambda line: line != "Ready.\n", output)]
            server.send_signal(signal.SIGTERM)
            output.read()
            assert server.wait(END_TIMEOUT_S) == 0
        finally:
            server.kill()
    lines = [OWN_LINE.fullmatch(line) for line in before if line]
    assert all(lines), before
    progress = [line["progress"] for line in lines if line is not None and line["progress"] is not None]
    assert progress[0].startswith("omni-server ")
    # Where 15 s pass without news, it says what it waits for.
    news = [text for text in progress if not text.startswith("waiting for ")]
    assert len(news) == len(set(news))
