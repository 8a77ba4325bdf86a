"""Images: made and edited, with previews, and downloaded."""

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from selenium.webdriver.common.keys import Keys

from omni_server.errors import InvalidRequestError
from omni_server.images import ImageOutput, ImageProgress, ImageSize, PartialImage
from omni_server.types import ImagePart, TextPart
from tests.browser.browser import DOWNLOADS, MEDIA, Browser, WebPage, wait_until
from tests.browser.scripted_server import ScriptedServer
from tests.unit.api.fake_generator import (
    EDITING_MODEL,
    IMAGE_MODEL,
    VERSATILE_MODEL,
    Hang,
    image_of,
    preview_of,
)

ALL_TABS = ["Chat", "Conversation", "Read aloud", "Transcribe", "Images"]


@pytest.fixture
def page(browser: Browser, server: ScriptedServer) -> WebPage:
    server.generator.model_info = EDITING_MODEL
    page = browser.open(server.url, script=DOWNLOADS)
    page.wait_ready()
    return page


def fill(page: WebPage, **fields: str) -> None:
    for name, text in fields.items():
        field = page.find(f"#image-{name}")
        if field.tag_name != "select":
            field.clear()
        field.send_keys(text)


def make(page: WebPage, prompt: str = "A lighthouse", **fields: str) -> None:
    fill(page, prompt=prompt, **fields)
    page.click("#image-start")


def wait_made(page: WebPage) -> None:
    page.wait("!document.querySelector('#image-start').hidden")


def made(server: ScriptedServer) -> ImageOutput:
    image = server.generator.last_request.image
    assert image is not None
    return image


def pixels_of(file: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(file)))


def test_image_has_what_was_chosen_and_can_be_downloaded(page: WebPage, server: ScriptedServer) -> None:
    make(page, "A lighthouse\nat dusk", negative="people", size="48x32", steps="7", seed="5")
    wait_made(page)
    asked = ImageOutput(ImageSize(48, 32), 5, negative_prompt="people", num_steps=7, num_partial_images=3)
    assert made(server) == asked
    assert server.generator.last_request.messages[-1].content == (TextPart("A lighthouse\nat dusk"),)
    page.wait("document.querySelector('#image-result').naturalWidth === 48")
    assert page.js("document.querySelector('#image-result').alt") == "A lighthouse\nat dusk"
    assert page.text("#image-status").startswith("48x32 pixels, seed 5, made in ")

    name, file = page.downloaded("#image-download")
    assert name == "image-5.png"
    np.testing.assert_array_equal(pixels_of(file), image_of(asked))
    assert page.console() == []


def test_preview_is_seen_while_the_image_is_made_and_can_be_stopped(
    page: WebPage, server: ScriptedServer
) -> None:
    preview = preview_of(ImageOutput(ImageSize(48, 32)), 0)
    server.generator.script = [ImageProgress(1, 4), PartialImage(0, preview), Hang()]
    fill(page, prompt="A lighthouse")
    page.find("#image-start").send_keys(Keys.ENTER)
    page.wait("document.querySelector('#image-status').textContent === 'Preview 1'")
    page.wait("document.querySelector('#image-result').naturalWidth === 48")
    assert page.js("document.querySelector('#image-progress').value") == 0.25
    assert page.texts("#image-download") == []

    page.browser.driver.switch_to.active_element.send_keys(Keys.ENTER)  # on the button that stops
    wait_made(page)
    wait_until(server.generator.generations[0].closed.is_set)
    assert page.texts("#image-status") == ["Stopped."]
    assert page.texts("#image-progress") == []
    assert page.js("document.activeElement.id") == "image-start"


def test_images_are_edited_in_their_order(page: WebPage, server: ScriptedServer, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.png" for name in ("red", "green", "blue")]
    for file in files:
        Image.new("RGB", (32, 32), file.stem).save(file)
    page.drop_here((MEDIA / "speech_hello.wav", "audio/wav"))
    assert page.texts("#image-problem") == ["“speech_hello.wav” is not an image."]
    page.drop_here((files[0], "image/png"))
    assert page.texts("#image-problem") == []
    page.find("#image-files").send_keys(f"{files[1]}")
    page.find("#image-files").send_keys(f"{files[2]}")
    assert page.texts("#image-problem") == ["This model takes up to 2 images to edit."]
    page.find("[aria-label='Remove red.png']").click()
    page.find("#image-files").send_keys(f"{files[2]}")
    assert page.texts("#image-problem") == []
    assert page.texts("#image-start") == ["Edit"]

    make(page, "Both in one", negative="people", seed="5")
    wait_made(page)
    first, second, text = server.generator.last_request.messages[-1].content
    assert isinstance(first, ImagePart)
    assert isinstance(second, ImagePart)
    assert [part.pixels[0, 0].tolist() for part in (first, second)] == [[0, 128, 0], [0, 0, 255]]
    assert text == TextPart("Both in one")
    assert made(server) == ImageOutput(None, 5, negative_prompt="people", num_partial_images=3)
    assert page.text("#image-status").startswith("32x32 pixels, seed 5, made in ")


def test_failure_after_a_preview_leaves_no_image(page: WebPage, server: ScriptedServer) -> None:
    preview = preview_of(ImageOutput(), 0)
    error = InvalidRequestError("The safety checker rejected it.")
    server.generator.script = [ImageProgress(1, 4), PartialImage(0, preview), error]
    make(page)
    wait_made(page)
    assert page.texts("#image-problem") == ["The safety checker rejected it."]
    assert page.texts("#image-result") == page.texts("#image-download") == []


def test_tab_is_there_only_for_images_and_has_only_what_the_model_has(
    browser: Browser, server: ScriptedServer
) -> None:
    page = browser.open(server.url)
    page.wait_ready()
    assert page.texts("[role=tab]") == ALL_TABS[:-1]

    server.generator.model_info = VERSATILE_MODEL
    page = browser.open(f"{server.url}#images")
    page.wait_ready()
    assert page.texts("[role=tab]") == ALL_TABS
    assert page.js("document.querySelector('[role=tab][aria-selected=true]').id") == "tab-images"

    server.generator.model_info = IMAGE_MODEL
    page.browser.driver.refresh()
    page.wait_ready()
    assert page.js("[...document.querySelector('#image-size').options].map(option => option.text)") == [
        "Automatic",
        "32x32",
        "48x32",
    ]
    hidden = ("#image-negative", "#image-steps", "#image-previews", "#image-add", "#image-width")
    assert [page.texts(selector) for selector in hidden] == [[]] * len(hidden)
    assert page.texts("#image-title") == ["Make an image"]
    make(page, seed="5")
    wait_made(page)
    assert made(server) == ImageOutput(None, 5)
