"""A headless Chromium or Chrome, driven over its DevTools protocol, for tests and screenshots; and the data of a page.

Invariant: nothing is installed: `find()` returns None where the machine has no browser. `CHROME` names another one.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")
SECONDS = 60.0


def find() -> str | None:
    return os.environ.get("CHROME") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """A page; `errors` has what it reported: exceptions, console errors, and requests that its policy refused."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._numbers = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._reading = asyncio.ensure_future(self._read())

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await asyncio.wait_for(self._answers[number], SECONDS)

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                answer = self._answers.pop(data["id"])
                if "error" in data:
                    answer.set_exception(RuntimeError(str(data["error"])))
                else:
                    answer.set_result(data["result"])
                continue
            parameters, method = data.get("params", {}), data["method"]
            if method == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
                self.errors.append(str([part.get("value") for part in parameters["args"]]))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                self.errors.append(parameters["entry"]["text"])
            elif method == "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    async def open(self, url: str, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Open a page and wait until it has drawn its screen."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        # keys go to the focused page, and a loaded machine may be late in giving a new one the focus
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await self.call("Page.bringToFront")
        await self.size(width, height)
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=theme)
        await self.call("Page.navigate", url=url)
        await self.until("document.querySelector('main h1, main .empty') !== null")

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression holds. Raises TimeoutError."""
        async with asyncio.timeout(SECONDS):
            while not await self.value(expression):
                await asyncio.sleep(0.02)

    async def press(self, key: str) -> None:
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def picture(self, path: Path) -> None:
        data = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(data["data"]))

    async def close(self) -> None:
        await self.call("Page.close")
        self._reading.cancel()


@asynccontextmanager
async def browser(executable: str) -> AsyncIterator[Any]:
    """Start the browser; yields an async function that makes a Tab."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            executable,
            *FLAGS,
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            # the locale of a container, in which the browser's language is no language tag
            env=os.environ | {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"},
        )
        try:
            address = Path(folder) / "DevToolsActivePort"
            async with asyncio.timeout(SECONDS):
                while not (address.exists() and address.read_text().count("\n")):
                    await asyncio.sleep(0.05)
            port = address.read_text().split("\n")[0]
            async with aiohttp.ClientSession() as session:

                async def tab() -> Tab:
                    async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                        about = await answer.json()
                    return Tab(await session.ws_connect(about["webSocketDebuggerUrl"], max_msg_size=0))

                yield tab
        finally:
            process.terminate()
            await process.wait()


def read_page(page: str) -> list[dict[str, Any]]:
    """Return the data of each run on a page by the name of its part."""
    runs: list[dict[str, Any]] = []
    for run, name, packed in re.findall(
        r'<script type="application/gzip" id="(\d)/([\w-]+)">([\w+/=]*)</script>', page
    ):
        runs += [{} for _ in range(int(run) + 1 - len(runs))]
        runs[int(run)][name] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return runs
