"""A headless Chromium, and the web page in it."""

import base64
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
    f"--use-file-for-fake-audio-capture={MEDIA / 'speech_hello.wav'}",
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


class Browser:
    """One Chromium with a microphone that hears `speech_hello.wav` again and again."""

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
        for flag in (*_FLAGS, f"--user-data-dir={self._profile.name}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = Chrome(options=options, service=Service(driver))

    def close(self) -> None:
        self.driver.quit()
        self._profile.cleanup()

    def cdp(self, command: str, **arguments: object) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)

    def emulate(self, width: int, height: int, scheme: str = "light", *, reduced_motion: bool = False) -> None:
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        motion = "reduce" if reduced_motion else "no-preference"
        features = [("prefers-color-scheme", scheme), ("prefers-reduced-motion", motion)]
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in features])

    def open(self, url: str, *, microphone: str = "granted", script: str = "") -> "WebPage":
        """The page in a fresh tab, with empty logs; `microphone` is "granted" or "denied", `script` runs first."""
        old = self.driver.current_window_handle
        self.driver.switch_to.new_window("tab")
        new = self.driver.current_window_handle
        self.driver.switch_to.window(old)
        self.driver.close()
        self.driver.switch_to.window(new)
        # These hold for as long as the tab.
        self.cdp("Page.addScriptToEvaluateOnNewDocument", source=_RECORDER + script)
        self.cdp("Browser.setPermission", origin=url, permission={"name": "microphone"}, setting=microphone)
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
        """Drags files, each with its media type, over the page and drops them there."""
        described = [[file.name, kind, base64.b64encode(file.read_bytes()).decode()] for file, kind in files]
        self.browser.driver.execute_script(
            """
            const transfer = new DataTransfer();
            for (const [name, type, data] of arguments[0]) {
              transfer.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, { type }));
            }
            const target = document.querySelector("#conversation");
            for (const name of ["dragenter", "dragover", "drop"]) {
              const event = new DragEvent(name, { dataTransfer: transfer, bubbles: true, cancelable: true });
              target.dispatchEvent(event);
            }
            """,
            described,
        )
        self.wait_attached(len(files))

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
        for entry in self.browser.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self._requests.append(message["params"]["request"])
        return self._requests

    def questions(self) -> list[dict[str, Any]]:
        """The bodies of all requests for an answer."""
        return [json.loads(r["postData"]) for r in self.requests() if r["url"].endswith("/v1/chat/completions")]


def wait_until(condition: Callable[[], bool], explain: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not so after {TIMEOUT_S} s: {explain()}"
        time.sleep(0.05)
