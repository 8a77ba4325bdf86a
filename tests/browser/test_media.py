"""Recordings and files on their way to the model."""

from pathlib import Path

import numpy as np
import pillow_heif
import soundfile
from PIL import Image
from selenium.webdriver.common.keys import Keys

from omni_server.types import AudioPart, ContentPart, ImagePart, TextPart, VideoPart
from tests.browser.browser import MEDIA, WebPage
from tests.browser.scripted_server import ScriptedServer

WAV, PNG = (MEDIA / "speech_hello.wav", "audio/wav"), (MEDIA / "shapes.png", "image/png")


def asked(server: ScriptedServer) -> tuple[ContentPart, ...]:
    return server.generator.last_request.messages[-1].content


def test_spoken_question_arrives_as_audio(page: WebPage, server: ScriptedServer) -> None:
    page.click("#big-mic")
    page.wait("/0:0[1-9]/.test(document.querySelector('#record-time').textContent)")
    # In the last second, which may have been a pause.
    page.wait(
        "[...document.querySelectorAll('#levels i')].some(e => e.style.getPropertyValue('--level') > 0.2)"
    )
    page.click("#record-send")
    page.wait_answered()
    (part,) = asked(server)
    assert isinstance(part, AudioPart)
    assert part.samples.dtype == np.float32
    assert 0.4 * 16_000 < len(part.samples) < 20 * 16_000
    assert np.abs(part.samples).max() > 0.05  # the microphone hears somebody
    assert page.js("document.querySelectorAll('.question .clip').length") == 1
    assert page.js("document.activeElement.id") == "mic"


def test_recording_can_be_discarded(page: WebPage, server: ScriptedServer) -> None:
    for discard in (
        lambda: page.click("#record-cancel"),
        lambda: page.find("#record-send").send_keys(Keys.ESCAPE),
    ):
        page.click("#mic")
        page.wait("document.querySelector('#recording').checkVisibility()")
        discard()
        page.wait("document.querySelector('#writing').checkVisibility()")
    assert server.generator.requests == []
    page.ask("Hello")
    page.wait_answered()
    assert asked(server) == (TextPart("Hello"),)


def test_dropped_files_are_shown_and_sent(page: WebPage, server: ScriptedServer) -> None:
    page.drop(WAV, PNG)
    assert page.js("document.querySelector('#drop').hidden")
    page.ask("What are these?")
    page.wait_answered()
    sound, picture, text = asked(server)
    assert isinstance(sound, AudioPart)
    assert isinstance(picture, ImagePart)
    assert text == TextPart("What are these?")
    expected, _ = soundfile.read(WAV[0], dtype="float32")
    assert len(sound.samples) == len(expected)
    assert np.abs(sound.samples - expected).max() <= 2 / 32768
    assert page.js("document.querySelector('.question img').naturalWidth") > 0
    assert page.texts("#attachments li") == []


def test_chosen_mp3_and_video_are_sent(page: WebPage, server: ScriptedServer) -> None:
    page.choose(MEDIA / "speech_hello.mp3", MEDIA / "ball.mp4")
    page.click("#send")
    page.wait_answered()
    sound, video = asked(server)
    assert isinstance(sound, AudioPart)
    assert 1.5 * 16_000 < len(sound.samples) < 3 * 16_000
    assert isinstance(video, VideoPart)


def test_image_and_video_that_the_browser_cannot_show_are_named(page: WebPage, tmp_path: Path) -> None:
    kinds = {"clip.mov": "video/quicktime", "photo.heic": "image/heic", "scan.HEIF": ""}
    for name in kinds:
        (tmp_path / name).write_bytes(bytes(999))
    page.drop(*((tmp_path / name, kind) for name, kind in kinds.items()))
    page.wait("document.querySelectorAll('#attachments .file').length === 3")
    assert page.texts("#attachments .file") == list(kinds)
    page.click("#send")
    page.wait("document.querySelectorAll('.question .file').length === 3")
    page.wait_complete()


def test_photo_that_the_browser_does_not_know_is_sent_as_it_is(
    page: WebPage, server: ScriptedServer, tmp_path: Path
) -> None:
    photo = tmp_path / "photo.heic"
    pillow_heif.from_pillow(Image.new("RGB", (48, 32), "red")).save(photo)
    page.drop((photo, ""))
    page.click("#send")
    page.wait_answered()
    (picture,) = asked(server)
    assert isinstance(picture, ImagePart)
    assert picture.pixels.shape == (32, 48, 3)


def test_attachment_can_be_taken_back(page: WebPage, server: ScriptedServer) -> None:
    page.choose(WAV[0], PNG[0])
    page.find("[aria-label='Remove speech_hello.wav']").click()
    page.wait_attached(1)
    page.click("#send")
    page.wait_answered()
    assert [type(part) for part in asked(server)] == [ImagePart]


def test_large_image_is_scaled_down_before_it_is_sent(page: WebPage, server: ScriptedServer) -> None:
    page.browser.driver.execute_async_script(
        """
        const done = arguments[0];
        const canvas = Object.assign(document.createElement("canvas"), { width: 4000, height: 3000 });
        canvas.getContext("2d").fillRect(0, 0, 4000, 3000);
        canvas.toBlob((blob) => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([blob], "photo.jpg", { type: "image/jpeg" }));
          document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true }));
          done();
        }, "image/jpeg");
        """
    )
    page.wait_attached(1)
    page.click("#send")
    page.wait_answered()
    (picture,) = asked(server)
    assert isinstance(picture, ImagePart)
    assert picture.pixels.shape == (768, 1024, 3)
