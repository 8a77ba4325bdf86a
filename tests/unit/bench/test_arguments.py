import pytest

from benchmarks.serving.arguments import parse


def test_the_default_load_is_closed_at_two_small_concurrencies() -> None:
    args = parse([])

    assert (args.concurrency, args.request_rate, args.requests_per_client) == ([1, 4], None, 4)
    assert (args.workload, args.modalities, args.server) == ("W1", "text,audio", "omni-server")


def test_lists_and_targets_are_numbers() -> None:
    args = parse(
        ["--request-rate", "0.5,1,2", "--targets", "ttfa=0.25,0.3,1", "--targets", "underrun=0,0,0.1"]
    )

    assert args.request_rate == [0.5, 1.0, 2.0]
    assert args.targets == [("ttfa", [0.25, 0.3, 1.0]), ("underrun", [0.0, 0.0, 0.1])]


def test_a_plain_text_server_is_asked_for_text() -> None:
    assert parse(["--server", "openai-text"]).modalities == "text"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--concurrency", "1,x"], "expected an integer, more than 0: 'x'"),
        (["--concurrency", "0"], "expected an integer, more than 0: '0'"),
        (["--concurrency", "1.5"], "expected an integer"),
        (["--request-rate", "inf"], "expected a number"),
        (["--request-rate", "nan"], "expected a number"),
        (["--concurrency", "1", "--request-rate", "1"], "not allowed with"),
        (["--targets", "rtf=1"], "expected ttfa="),
        (["--targets", "ttfa=1,2,3"], "3 values for 2 load levels"),
        (["--server", "openai-text", "--modalities", "text,audio"], "answers with text only"),
        (["--modalities", "text", "--codec-tokens", "5"], "--codec-tokens is about speech"),
        (["--modalities", "text", "--plot", "x.png"], "--plot is about speech"),
        (["--json", "/no/such/folder/x.json"], "no such folder"),
        (["--con", "1"], "unrecognized arguments"),
        (["--concurency", "1"], "unrecognized arguments: --concurency 1; did you mean --concurrency?"),
    ],
)
def test_a_wrong_command_line_is_refused_with_its_reason(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
