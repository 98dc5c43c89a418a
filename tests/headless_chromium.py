"""A page in headless Chromium, driven by the DevTools protocol over two pipes: no package, no port, no network."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_S = 30.0


def find_browser() -> str | None:
    """The path of an installed browser of the family, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Page:
    """One page in a browser of its own; `console` collects what its console and its errors said."""

    def __init__(self, browser: str, profile: Path) -> None:
        """Start the browser with a fresh profile in `profile`."""
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        options = [
            *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars", "--mute-audio"),
            *(f"--user-data-dir={profile}", "about:blank"),
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", script, browser, *options],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.console: list[str] = []
        self.requests: list[str] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's answer. Raises RuntimeError where the browser refuses it, TimeoutError where it is silent."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session and not method.startswith("Target."):
            command["sessionId"] = self._session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next(f"no answer to {method}")
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def _next(self, what: str) -> dict[str, Any]:
        """The next message; those that are events are noted."""
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            got = os.read(self._in, 1 << 16) if ready else b""
            if not got:
                raise TimeoutError(f"{what} within {PATIENCE_S:g} s, browser status {self._process.poll()}")
            self._buffer += got
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.console.append(json.dumps(event["args"]))
        elif method == "Log.entryAdded":
            self.console.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])

    def open(self, file: Path) -> None:
        """Load a file and wait until it is loaded."""
        self._loaded = False
        self.send("Page.navigate", url=file.resolve().as_uri())
        while not self._loaded:
            self._next(f"{file} was not loaded")

    def run(self, script: str) -> Any:
        """What a JavaScript expression gives, as JSON. Raises RuntimeError where it throws."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str, code: int = 0, text: str = "", shift: bool = False) -> None:
        """A key, down and up. code: its virtual key code; text: what it types."""
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def size(self, width: int, height: int, phone: bool = False) -> None:
        """The window's size in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def media(self, scheme: str = "light", kind: str = "screen") -> None:
        """The colour scheme that is preferred, "light" or "dark", and the medium, "screen" or "print"."""
        self.send(
            "Emulation.setEmulatedMedia", media=kind, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def screenshot(self, file: Path, clip: tuple[float, float, float, float] | None = None) -> None:
        """A PNG of the window, or of a part of the page: x, y, width, height."""
        options: dict[str, Any] = {}
        if clip:
            options = {"clip": dict(zip(("x", "y", "width", "height"), clip, strict=True)) | {"scale": 1}}
            options["captureBeyondViewport"] = True
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **options)["data"]))

    def pdf(self) -> bytes:
        """The page printed."""
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])
