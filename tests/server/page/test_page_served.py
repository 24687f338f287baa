"""The chat page as `gapless serve` serves it, with a real model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers_server import RunningServer

pytest.importorskip("playwright", reason="the chat page is tested with playwright")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PATIENCE_MS = 60_000
PARAMETERS = {"Temperature": "0", "Max tokens": "48", "Seed": "1", "Top k": "10", "Min p": "0.1"}


@pytest.mark.models
def test_a_model_answers(browser: Browser, coder_server: RunningServer):
    context = browser.new_context()
    wrong: list[str] = []
    context.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    context.on("weberror", lambda error: wrong.append(str(error.error)))
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(coder_server.url)
    page.get_by_role("button", name="Settings").click()
    panel = page.get_by_role("complementary", name="Settings")
    for label, value in PARAMETERS.items():
        panel.get_by_label(label).fill(value)

    answer = page.locator(".answer").last
    status = page.locator("#status")
    page.get_by_label("Message", exact=True).fill("Write hello world in Python. Answer with code only.")
    page.keyboard.press("Enter")
    expect(answer.locator(".code code")).to_contain_text("print", timeout=PATIENCE_MS)
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=PATIENCE_MS)
    expect(answer).to_contain_text("tok/s")
    expect(status).to_contain_text("running 0 /", timeout=PATIENCE_MS)

    panel.get_by_label("Max tokens").fill("3000")
    page.get_by_label("Message", exact=True).fill("Write a class for a bank account, and its tests.")
    page.keyboard.press("Enter")
    expect(answer).to_contain_text("class", timeout=PATIENCE_MS)
    page.get_by_role("button", name="Stop").click()
    expect(answer).to_contain_text("Stopped.")
    expect(status).to_contain_text("running 0 /", timeout=PATIENCE_MS)
    context.close()
    assert wrong == []
