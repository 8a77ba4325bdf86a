import pytest

from benchmarks.serving.arguments import parse


def test_the_default_load_is_closed_at_two_small_concurrencies() -> None:
    args = parse([])

    assert (args.concurrency, args.request_rate, args.requests_per_client) == ([1, 4], None, 4)
    assert (args.workload, args.modalities, args.server) == ("W1", "text,audio", "omni-server")


def test_a_plain_text_server_is_asked_for_text() -> None:
    assert parse(["--server", "openai-text"]).modalities == "text"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--concurrency", "1,x"], "'x' is not a whole number"),
        (["--concurrency", "0"], "must be 1 or more"),
        (["--request-rate", "inf"], "'inf' is not a number of requests per second"),
        (["--concurrency", "1", "--request-rate", "1"], "not allowed with"),
        (["--server", "openai-text", "--modalities", "text,audio"], "answers with text only"),
        (["--modalities", "text", "--codec-tokens", "5"], "--codec-tokens is about speech"),
        (["--json", "/no/such/folder/x.json"], "no such folder"),
        (["--workload", "images", "--text-tokens", "5"], "--text-tokens is not for --workload images"),
        (["--workload", "images", "--server", "vllm-omni"], "needs --server omni-server"),
        (["--workload", "images", "--size", "big"], "'big' is not WIDTHxHEIGHT, as in 1024x1024"),
        (["--partial-images", "0"], "--partial-images is only for --workload images"),
        (["--concurency", "1"], "unrecognized arguments: --concurency 1"),
    ],
)
def test_a_wrong_command_line_is_refused_with_its_reason(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
