"""A headless Chromium, and the web page in it."""

import base64
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

MEDIA = Path(__file__).parents[1] / "data" / "media"
TIMEOUT_S = 60.0

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # small in many containers
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--use-fake-device-for-media-stream",
)

_RECORDER = """
window.scheduledSounds = [];
const start = AudioBufferSourceNode.prototype.start;
AudioBufferSourceNode.prototype.start = function (time) {
  if (this.context instanceof AudioContext) {
    window.scheduledSounds.push({ time, rate: this.buffer.sampleRate, samples: [...this.buffer.getChannelData(0)] });
  }
  return start.call(this, time);
};
window.stoppedSounds = 0;
const stop = AudioBufferSourceNode.prototype.stop;
AudioBufferSourceNode.prototype.stop = function () {
  window.stoppedSounds += 1;
  return stop.call(this);
};
"""
"""Notes what the page hands to the sound card, before the page's own scripts run."""


DOWNLOADS = """
window.downloads = [];
const click = HTMLAnchorElement.prototype.click;
HTMLAnchorElement.prototype.click = function () {
  const file = { name: this.download };
  window.downloads.push(file);
  fetchOwn(this.href).then((bytes) => (file.bytes = bytes));
};
const made = new Map();
const createUrl = URL.createObjectURL;
URL.createObjectURL = (blob) => {
  const url = createUrl(blob);
  made.set(url, blob);
  return url;
};
async function fetchOwn(url) {
  return [...new Uint8Array(await made.get(url).arrayBuffer())];
}
"""
"""Keeps the files that the page would give to the user. For `Browser.open`; see `WebPage.downloaded`."""

PAUSE_S = 1.5
"""In what the microphone hears: longer than the server waits for the end of a turn."""


def _with_pause(file: Path) -> tuple[npt.NDArray[np.int16], int]:
    samples, rate_hz = soundfile.read(file, dtype="int16")
    return np.concatenate([samples, np.zeros(int(PAUSE_S * rate_hz), dtype=np.int16)]), rate_hz


class Browser:
    """One Chromium with a microphone that hears `speech_hello.wav` and a pause, again and again."""

    def __init__(self) -> None:
        chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
        if chromium is None or driver is None:
            pytest.fail(
                "tests/browser needs Chromium and its driver; on Debian: "
                "apt-get install --no-install-recommends chromium chromium-driver"
            )
        self._profile = tempfile.TemporaryDirectory(prefix="omni-browser-", ignore_cleanup_errors=True)
        options = ChromeOptions()
        options.binary_location = chromium
        voice = Path(self._profile.name) / "voice.wav"
        soundfile.write(voice, *_with_pause(MEDIA / "speech_hello.wav"))
        microphone = f"--use-file-for-fake-audio-capture={voice}"
        for flag in (*_FLAGS, microphone, f"--user-data-dir={self._profile.name}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = Chrome(options=options, service=Service(driver))

    def close(self) -> None:
        self.driver.quit()
        self._profile.cleanup()

    def cdp(self, command: str, **arguments: object) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)

    def emulate(
        self, width: int, height: int, scheme: str = "light", *, reduced_motion: bool = False
    ) -> None:
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        motion = "reduce" if reduced_motion else "no-preference"
        features = [("prefers-color-scheme", scheme), ("prefers-reduced-motion", motion)]
        self.cdp(
            "Emulation.setEmulatedMedia",
            features=[{"name": name, "value": value} for name, value in features],
        )

    def open(self, url: str, *, microphone: str = "granted", script: str = "") -> "WebPage":
        """The page in a fresh tab, with empty logs and nothing kept. `microphone` is "granted" or "denied",
        `script` runs first."""
        old = self.driver.current_window_handle
        self.driver.switch_to.new_window("tab")
        new = self.driver.current_window_handle
        self.driver.switch_to.window(old)
        self.driver.close()
        self.driver.switch_to.window(new)
        # These hold for as long as the tab.
        self.cdp("Page.addScriptToEvaluateOnNewDocument", source=_RECORDER + script)
        self.cdp("Browser.setPermission", origin=url, permission={"name": "microphone"}, setting=microphone)
        self.cdp("Storage.clearDataForOrigin", origin=url.partition("#")[0], storageTypes="local_storage")
        self.emulate(1280, 860)
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        self.driver.get(url)
        return WebPage(self)


class WebPage:
    """The page as a user and the developer tools see it. Elements are named by CSS selectors."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self._requests: list[dict[str, Any]] = []
        self._frames: list[dict[str, Any]] = []

    def js(self, expression: str, *arguments: object) -> Any:
        return self.browser.driver.execute_script(f"return {expression}", *arguments)

    def wait(self, expression: str) -> None:
        """Returns when the JavaScript expression is true."""
        wait_until(lambda: bool(self.js(expression)), lambda: f"{expression}\n{self.describe()}")

    def describe(self) -> str:
        return f"{self.js('document.body.innerText')}\n{self.console()}"

    def wait_ready(self) -> None:
        self.wait("document.querySelector('#state').dataset.state === 'ready'")

    def wait_complete(self, number: int = 1) -> None:
        """Returns when `number` answers have come to an end."""
        self.wait(f"document.querySelectorAll('.answer[aria-busy=false]').length === {number}")

    def wait_answered(self, number: int = 1) -> None:
        """Returns when, beyond that, nothing is played any more."""
        self.wait_complete(number)
        self.wait("document.querySelector('#stop').hidden")

    def find(self, selector: str) -> WebElement:
        return self.browser.driver.find_element(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def write(self, text: str) -> None:
        self.find("#text").send_keys(text)

    def ask(self, text: str) -> None:
        self.write(text)
        self.click("#send")

    def text(self, selector: str) -> str:
        """As it is in the document, hidden or not."""
        content: str = self.js("document.querySelector(arguments[0]).textContent", selector)
        return content

    def texts(self, selector: str) -> list[str]:
        """Of all elements that can be seen."""
        contents: list[str] = self.js(
            "[...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility()).map(e => e.textContent)",
            selector,
        )
        return contents

    def voices(self) -> list[str]:
        """What there is to choose from."""
        names: list[str] = self.js("[...document.querySelector('#voice').options].map(option => option.text)")
        return names

    def choose(self, *files: Path) -> None:
        self.find("#files").send_keys("\n".join(str(file) for file in files))
        self.wait_attached(len(files))

    def wait_attached(self, number: int) -> None:
        self.wait(f"document.querySelectorAll('#attachments li').length === {number}")

    def drop(self, *files: tuple[Path, str]) -> None:
        """Files, each with its media type, onto the chat."""
        self.drop_here(*files)
        self.wait_attached(len(files))

    def drop_here(self, *files: tuple[Path, str]) -> None:
        """Drags files over the tab that is open and drops them there."""
        described = [[file.name, kind, base64.b64encode(file.read_bytes()).decode()] for file, kind in files]
        self.browser.driver.execute_script(
            """
            const transfer = new DataTransfer();
            for (const [name, type, data] of arguments[0]) {
              transfer.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, { type }));
            }
            const target = document.querySelector("[role=tabpanel]:not([hidden])");
            for (const name of ["dragenter", "dragover", "drop"]) {
              const event = new DragEvent(name, { dataTransfer: transfer, bubbles: true, cancelable: true });
              target.dispatchEvent(event);
            }
            """,
            described,
        )

    def sounds(self) -> list[dict[str, Any]]:
        """What was scheduled for playback: `{time, rate, samples}` of each piece."""
        sounds: list[dict[str, Any]] = self.js("window.scheduledSounds")
        return sounds

    def num_samples(self) -> int:
        """In all that was scheduled for playback."""
        number: int = self.js("window.scheduledSounds.reduce((sum, sound) => sum + sound.samples.length, 0)")
        return number

    def console(self) -> list[str]:
        """What is in the console that was not there at the last call."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.browser.driver.get_log("browser")]

    def requests(self) -> list[dict[str, Any]]:
        """All requests so far: `{url, method, headers, postData?}`."""
        self._read_log()
        return self._requests

    def frames(self) -> list[dict[str, Any]]:
        """All events that have been sent through WebSockets."""
        self._read_log()
        return self._frames

    def _read_log(self) -> None:
        for entry in self.browser.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            match message["method"]:
                case "Network.requestWillBeSent":
                    self._requests.append(message["params"]["request"])
                case "Network.webSocketFrameSent" if message["params"]["response"]["opcode"] == 1:
                    self._frames.append(json.loads(message["params"]["response"]["payloadData"]))

    def questions(self) -> list[dict[str, Any]]:
        """The bodies of all requests for an answer."""
        return self.bodies("v1/chat/completions")

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """Of all requests for `path` that have JSON."""
        return [json.loads(r["postData"]) for r in self.requests() if r["url"].endswith(f"/{path}")]

    def settle(self, **fields: str) -> None:
        """Writes into the fields of the settings; underscores stand for the hyphens of their ids."""
        self.click("#settings-button")
        for name, text in fields.items():
            field = self.find(f"#{name.replace('_', '-')}")
            field.clear()
            field.send_keys(text)
        self.click("#settings-dialog .primary")

    def downloaded(self, selector: str) -> tuple[str, bytes]:
        """Name and content of the file that a click on the button gives, where `DOWNLOADS` runs."""
        self.click(selector)
        self.wait("window.downloads.at(-1)?.bytes !== undefined")
        file = self.js("window.downloads.at(-1)")
        return file["name"], bytes(file["bytes"])

    def copied(self, selector: str) -> str:
        """What a click on the button copies."""
        self.browser.cdp(
            "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
        )
        # It says so for two seconds only.
        self.browser.driver.execute_script(
            """
            const button = document.querySelector(arguments[0]);
            window.hasCopied = false;
            new MutationObserver(() => (window.hasCopied ||= button.textContent === "Copied"))
              .observe(button, { childList: true });
            """,
            selector,
        )
        self.click(selector)
        self.wait("window.hasCopied")
        text: str = self.browser.driver.execute_async_script(
            "navigator.clipboard.readText().then(arguments[0])"
        )
        return text


def wait_until(condition: Callable[[], bool], explain: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not so after {TIMEOUT_S} s: {explain()}"
        time.sleep(0.05)
