"""The page and the real server: three engines, the demo checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from PIL import Image

from tests.browser.browser import MEDIA, Browser, WebPage
from tests.checkpoints.write import make_demo_checkpoint
from tests.integration.server_process import MODEL, ServerProcess

SAMPLES_PER_CODE = 480


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("demo")
    process = ServerProcess(make_demo_checkpoint(folder / "checkpoint"), folder / "log.txt")
    try:
        yield process
    finally:
        exit_code = process.terminate()
    assert exit_code == 0, process.log
    assert "Traceback" not in process.log


_BOUNDS = """
const talkerBounds = { min_tokens: 100, max_tokens: 200 };
const fetchUnbounded = window.fetch;
window.fetch = (url, options) => {
  if (!String(url).endsWith("/v1/chat/completions")) return fetchUnbounded(url, options);
  const bounds = { min_tokens: 8, max_tokens: 64, stage_sampling: { talker: talkerBounds } };
  return fetchUnbounded(url, { ...options, body: JSON.stringify({ ...JSON.parse(options.body), ...bounds }) });
};
"""
"""The demo model ends its answers by chance: between no audio at all and half a minute. Here it is 2 to 4
s."""


@pytest.fixture
def page(browser: Browser, demo: ServerProcess) -> WebPage:
    page = browser.open(f"{demo.url}/", script=_BOUNDS)
    page.wait_ready()
    return page


def check_spoken_answer(page: WebPage, number: int = 1) -> None:
    """Everything that is seen and heard of the last of `number` answers, and that nothing went wrong on the
    way."""
    page.wait_complete(number)
    assert page.texts(".failure") == []
    page.wait(f"document.querySelector('.turn:nth-child({number}) .total').checkVisibility()")
    last = f".turn:nth-child({number})"
    assert len(page.text(f"{last} .answer > .text").split()) > 1
    assert len(page.texts(f"{last} .answer .clip")) == 1
    for name, label in (("first-text", "First text"), ("first-audio", "First audio"), ("total", "Done")):
        (shown,) = page.texts(f"{last} .{name}")
        assert shown.startswith(f"{label} ")
        assert shown.endswith(" s")
    assert page.num_samples() >= 100 * SAMPLES_PER_CODE


def test_typed_conversation_streams_text_and_audio_and_asks_no_other_host(
    page: WebPage, demo: ServerProcess
) -> None:
    page.ask("Hello, who are you?")
    check_spoken_answer(page)
    page.ask("And what can you do?")
    check_spoken_answer(page, 2)
    history = page.questions()[-1]["messages"]
    assert [message["role"] for message in history] == ["user", "assistant", "user"]
    assert history[1]["audio"]["id"].startswith("audio_")

    assert page.text("#state-text") == MODEL
    urls = [request["url"] for request in page.requests()]
    assert f"{demo.url}/v1/chat/completions" in urls
    assert [url for url in urls if not url.startswith((f"{demo.url}/", "blob:", "data:"))] == []
    missing = httpx2.get(f"{demo.url}/v1/audio/voices").status_code == 404
    complaints = [line for line in page.console() if not (missing and "/v1/audio/voices" in line)]
    assert complaints == []


def test_spoken_question_is_answered(page: WebPage) -> None:
    page.click("#big-mic")
    page.wait("/0:0[2-9]/.test(document.querySelector('#record-time').textContent)")
    page.click("#record-send")
    check_spoken_answer(page)
    (part,) = page.questions()[0]["messages"][0]["content"]
    assert part["type"] == "input_audio"


def test_dropped_image_and_audio_are_answered(page: WebPage) -> None:
    page.drop((MEDIA / "shapes.png", "image/png"), (MEDIA / "speech_weather.wav", "audio/wav"))
    page.ask("What do you see and hear?")
    check_spoken_answer(page)


def test_photo_of_a_phone_is_answered(page: WebPage, tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    Image.effect_noise((4000, 3000), 60).convert("RGB").save(photo, quality=60)
    page.choose(photo)
    page.ask("What is this?")
    check_spoken_answer(page)


def test_stopped_answer_makes_way_for_the_next(page: WebPage, demo: ServerProcess) -> None:
    page.js("Object.assign(talkerBounds, { min_tokens: 2000, max_tokens: 2000 })")
    page.ask("Tell me a long story.")
    page.wait("document.querySelector('.answer > .text').textContent.length > 0")
    page.click("#stop")
    page.wait_answered()
    demo.wait_until_idle()
    page.js("Object.assign(talkerBounds, { min_tokens: 100, max_tokens: 200 })")
    page.ask("A short one, then.")
    check_spoken_answer(page, 2)
