"""Fixtures for the chat page: a browser, and a server whose answers the test writes."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from scripted_server import ScriptedServer, scripted_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


REQUIRED = os.environ.get("GAPLESS_REQUIRE_CHROMIUM") == "1"

if (
    REQUIRED and importlib.util.find_spec("playwright") is None
):  # the test modules would be skipped without it
    raise RuntimeError(
        "GAPLESS_REQUIRE_CHROMIUM=1 says that the chat page must be tested, and playwright is missing"
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        assert not REQUIRED, "there is no Chromium, and GAPLESS_REQUIRE_CHROMIUM=1 says that there must be"
        pytest.skip("there is no Chromium; install it for the tests of the chat page")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def running_server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def server(running_server: ScriptedServer) -> ScriptedServer:
    running_server.reset()
    return running_server


@dataclass
class Watch:
    """What a page must never do: speak with another machine, open a dialog, break its policy, raise."""

    origin: str
    wrong: list[str] = field(default_factory=list)

    def over(self, context: BrowserContext) -> None:
        def console(text: str) -> None:
            if "Content Security Policy" in text:
                self.wrong.append(text)

        context.on("request", lambda request: self.requested(request.url))
        context.on("console", lambda message: console(message.text))
        context.on("weberror", lambda error: self.wrong.append(str(error.error)))
        context.on("dialog", lambda dialog: (self.wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))

    def requested(self, url: str) -> None:
        if not url.startswith((self.origin, "data:image/svg+xml,")):
            self.wrong.append(f"request to {url}")


@pytest.fixture
def context(browser: Browser, server: ScriptedServer) -> Iterator[BrowserContext]:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    context.set_default_timeout(30_000)
    watch = Watch(server.url)
    watch.over(context)
    yield context
    context.close()
    assert watch.wrong == []


@pytest.fixture
def page(context: BrowserContext, server: ScriptedServer) -> Page:
    page = context.new_page()
    page.goto(server.url)
    return page
