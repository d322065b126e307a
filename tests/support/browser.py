"""Headless Chromium, driven through ChromeDriver's HTTP interface.

Debian has them in the packages chromium and chromium-driver.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root needs
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-smooth-scrolling",  # a key of a burst would move on what is not yet scrolled
    "--hide-scrollbars",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """A window of a browser.

    Arguments:
        session: the URL of a session of ChromeDriver.
    """

    def __init__(self, session: str) -> None:
        self._session = session

    def call(self, command: str, body: Mapping[str, Any] | None = None) -> Any:
        """Posts a command of the WebDriver protocol; gives its value."""
        return _post(f"{self._session}/{command}", body or {})

    def open(self, file: Path) -> None:
        """Opens a file, and waits until its script has run."""
        self.call("url", {"url": file.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of an expression of JavaScript, in which `a[0]` is the first argument."""
        code = f"const a = arguments; return ({script});"
        return self.call("execute/sync", {"script": code, "args": list(arguments)})

    def click(self, selector: str) -> None:
        """Clicks on the first element that a selector finds, as a user would."""
        self.call(f"element/{self._find(selector)}/click")

    def keys(self, selector: str, text: str) -> None:
        """Types into an element."""
        self.call(f"element/{self._find(selector)}/value", {"text": text})

    def _find(self, selector: str) -> str:
        body = {"using": "css selector", "value": selector}
        found: str = self.call("element", body)[_ELEMENT]
        return found

    def texts(self, selector: str) -> list[str]:
        """The visible texts of all elements that a selector finds."""
        script = "[...document.querySelectorAll(a[0])].map((e) => e.innerText)"
        found: list[str] = self.run(script, selector)
        return found

    def width(self, width: int, height: int = 900) -> None:
        """Makes the page so wide, also as narrow as a telephone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)

    def prefers(self, scheme: str) -> None:
        """Sets the colour scheme that the user prefers."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._devtools("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self, file: Path) -> None:
        """Writes a picture of the whole page."""
        shot = self._devtools("Page.captureScreenshot", {"captureBeyondViewport": True})
        file.write_bytes(base64.b64decode(shot["data"]))

    def pixels(self, selector: str) -> list[list[int]]:
        """The distinct colours of a canvas."""
        found: list[list[int]] = self.run(_COLOURS, selector)
        return found

    def console(self) -> list[str]:
        """What the browser has logged since the last call: errors, refused content."""
        return [entry["message"] for entry in self.call("se/log", {"type": "browser"})]

    def _devtools(self, command: str, parameters: Mapping[str, Any]) -> Any:
        return self.call("goog/cdp/execute", {"cmd": command, "params": parameters})


_COLOURS = """(() => {
  const shown = document.querySelector(a[0]), c = document.createElement("canvas");
  [c.width, c.height] = [shown.width, shown.height];
  const context = c.getContext("2d", { willReadFrequently: true });
  context.drawImage(shown, 0, 0);
  const d = context.getImageData(0, 0, c.width, c.height).data;
  const found = new Set();
  for (let i = 0; i < d.length; i += 4) found.add(d.slice(i, i + 4).join());
  return [...found].map((text) => text.split(",").map(Number));
})()"""


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Starts a browser; skips the test where there is none.

    Arguments:
        profile: an empty folder for what it stores.
    """
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    port = _free_port()
    driver = subprocess.Popen([DRIVER, f"--port={port}", "--silent"], start_new_session=True)
    base = f"http://127.0.0.1:{port}"
    try:
        _until_ready(f"{base}/status")
        options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = _post(f"{base}/session", {"capabilities": {"alwaysMatch": wanted}})
        session = f"{base}/session/{made['sessionId']}"
        try:
            yield Browser(session)
        finally:
            _request(urllib.request.Request(session, method="DELETE"))
    finally:
        driver.terminate()
        driver.wait(30)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _until_ready(url: str) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            if _request(urllib.request.Request(url))["ready"]:
                return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)


def _post(url: str, body: Mapping[str, Any]) -> Any:
    data = json.dumps(body).encode()
    return _request(urllib.request.Request(url, data, {"Content-Type": "application/json"}))


def _request(request: urllib.request.Request) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(json.load(error)["value"]["message"]) from None
