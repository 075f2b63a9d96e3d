"""Chromium by its own driver's HTTP interface (W3C WebDriver): a page, its elements, its console; no package needed."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MISSING = "" if shutil.which("chromedriver") and shutil.which("chromium") else "no chromium and chromium-driver"
_ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """One tab."""

    def __init__(self, port: int, profile: str) -> None:
        self._root = f"http://127.0.0.1:{port}"
        options = {"args": [*_ARGUMENTS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._root += f"/session/{answer['sessionId']}"

    def open(self, page: Path, fragment: str = "") -> None:
        self._send("POST", "/url", {"url": "about:blank"})  # another fragment alone would load nothing anew
        self._send("POST", "/url", {"url": page.as_uri() + fragment})
        # On a busy machine the driver was seen to answer before the page's own script had run.
        for _ in range(600):
            if self.run("return document.readyState === 'complete' && location.protocol === 'file:'"):
                return
            time.sleep(0.05)
        raise RuntimeError(f"{page} does not load")

    def run(self, script: str, *arguments):
        """The value of a JavaScript function's body."""
        return self._send("POST", "/execute/sync", {"script": script, "args": arguments})

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """The size in CSS pixels, also below the 500 that a window has at least, and the colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", {"features": [feature]})

    def javascript(self, *, on: bool) -> None:
        """Whether pages that are opened from now on may run scripts."""
        self._command("Emulation.setScriptExecutionDisabled", {"value": not on})

    def console(self) -> list[str]:
        """Errors and warnings since the last call."""
        entries = self._send("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        picture = self._command("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        self._send("DELETE", "")

    def _command(self, name: str, parameters: dict):
        return self._send("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def _send(self, method: str, path: str, data: dict | None = None):
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self._root + path, body, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None


@contextlib.contextmanager
def started():
    """A browser of this process, which ends with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen(
            ["chromedriver", f"--port={port}", "--silent"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            browser = _connected(port, profile)
            yield browser
            browser.close()
        finally:
            driver.terminate()
            driver.wait(30)


def _connected(port: int, profile: str) -> Browser:
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return Browser(port, profile)
    raise RuntimeError("chromedriver does not answer")
