"""The chat page in a real browser."""

from __future__ import annotations

import pytest
from scripted_server import PATIENCE_S, ScriptedServer

pytest.importorskip("playwright", reason="the chat page is tested with playwright")

from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect


def ask(page: Page, text: str = "Hello") -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def last_answer(page: Page) -> Locator:
    return page.locator(".answer").last


def done(page: Page) -> None:
    expect(last_answer(page)).not_to_have_attribute("aria-busy", "true")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def open_settings(page: Page) -> Locator:
    page.get_by_role("button", name="Settings").click()
    return page.get_by_role("complementary", name="Settings")


class TestAnswers:
    def test_an_answer_is_shown_while_it_comes(self, page: Page, server: ScriptedServer):
        answer = server.next_answer()
        ask(page, "Who are you?")
        answer.say("I am ", "**small")
        expect(last_answer(page)).to_contain_text("I am **small")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        answer.say("**.").finish(num_tokens=1234)
        done(page)
        expect(last_answer(page).locator("strong")).to_have_text("small")
        expect(last_answer(page)).to_contain_text("1,234 tokens")
        expect(last_answer(page)).to_contain_text("tok/s")
        expect(last_answer(page)).to_contain_text("first token after")
        expect(last_answer(page)).to_contain_text("context 1,244 of 8,192")
        expect(page.get_by_text("The answer is complete.")).to_be_attached()
        assert server.next_request() == {
            "model": "tiny-llama",
            "messages": [{"role": "user", "content": "Who are you?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def test_the_whole_conversation_is_sent(self, page: Page, server: ScriptedServer):
        server.next_answer().delta(reasoning_content="Hm.").say("One").finish()
        ask(page, "First")
        done(page)
        server.next_answer().say("Two").finish()
        ask(page, "Second")
        expect(last_answer(page)).to_contain_text("Two")
        server.next_request()
        assert server.next_request()["messages"] == [
            {"role": "user", "content": "First"},
            {"role": "assistant", "content": "One"},
            {"role": "user", "content": "Second"},
        ]

    def test_thoughts_are_folded(self, page: Page, server: ScriptedServer):
        answer = server.next_answer()
        ask(page)
        answer.delta(reasoning_content="Let me *see*")
        expect(page.get_by_text("Thinking …")).to_be_visible()
        expect(page.get_by_text("Let me")).to_be_hidden()
        answer.say("42").finish()
        done(page)
        page.get_by_text("Thoughts").click()
        expect(page.get_by_text("Let me")).to_be_visible()

    @pytest.mark.parametrize("how", ["button", "escape"])
    def test_stop_closes_the_connection(self, page: Page, server: ScriptedServer, how: str):
        answer = server.next_answer()
        ask(page)
        answer.say("On and on").until_closed()
        expect(last_answer(page)).to_contain_text("On and on")
        if how == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        assert answer.closed.wait(PATIENCE_S)
        done(page)
        expect(last_answer(page)).to_contain_text("Stopped.")
        expect(last_answer(page)).to_contain_text("On and on")

    def test_try_again_replaces_the_answer(self, page: Page, server: ScriptedServer):
        server.next_answer().say("Bad").finish()
        ask(page)
        done(page)
        server.next_answer().say("Better").finish()
        page.get_by_role("button", name="Try again").click()
        expect(last_answer(page)).to_contain_text("Better")
        expect(page.get_by_text("Bad")).to_have_count(0)
        server.next_request()
        assert server.next_request()["messages"] == [{"role": "user", "content": "Hello"}]

    def test_an_edited_question_is_answered_anew(self, page: Page, server: ScriptedServer):
        for question in ("First", "Second"):
            server.next_answer().say(f"Answer to {question}").finish()
            ask(page, question)
            done(page)
            server.next_request()
        page.get_by_text("First", exact=True).hover()
        page.get_by_role("button", name="Edit").first.click()
        server.next_answer().say("Other").finish()
        page.get_by_label("Edit your message").fill("Third")
        page.keyboard.press("Enter")
        expect(last_answer(page)).to_contain_text("Other")
        expect(page.locator(".message")).to_have_count(2)
        assert server.next_request()["messages"] == [{"role": "user", "content": "Third"}]

    def test_shift_enter_is_a_new_line(self, page: Page, server: ScriptedServer):
        server.next_answer().say("Yes").finish()
        page.get_by_label("Message", exact=True).fill("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        assert server.next_request()["messages"][0]["content"] == "one\ntwo"
        done(page)

    def test_the_limit_of_tokens_is_named(self, page: Page, server: ScriptedServer):
        server.next_answer().say("Long").finish("length")
        ask(page)
        expect(last_answer(page)).to_contain_text("limit of tokens")

    def test_code_can_be_copied(self, page: Page, server: ScriptedServer):
        server.next_answer().say("```python\nprint(1 < 2)\n```\n").finish()
        ask(page)
        done(page)
        expect(page.locator(".code-bar")).to_contain_text("python")
        page.locator(".code").get_by_role("button", name="Copy").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == "print(1 < 2)"

    def test_reading_further_up_is_not_disturbed(self, page: Page, server: ScriptedServer):
        answer = server.next_answer()
        ask(page)
        answer.say(*(f"Line {i}\n\n" for i in range(100)), "The 100th")
        scroller = page.locator("#scroller")
        expect(page.get_by_text("The 100th")).to_be_in_viewport()
        scroller.hover()
        page.mouse.wheel(0, -600)
        expect(page.get_by_role("button", name="Go to the end")).to_be_visible()
        top = scroller.evaluate("node => node.scrollTop")
        answer.say(*("More.\n\n" for _ in range(50)), "The end").finish()
        done(page)
        assert scroller.evaluate("node => node.scrollTop") == top
        page.get_by_role("button", name="Go to the end").click()
        expect(page.get_by_text("The end", exact=True)).to_be_in_viewport()


class TestKept:
    def test_a_reload_keeps_the_conversation(self, page: Page, server: ScriptedServer):
        server.next_answer().say("# Title\n\nText").finish()
        ask(page, "Say <b>it</b>")
        done(page)
        page.reload()
        expect(page.locator(".question")).to_contain_text("Say <b>it</b>")
        expect(page.get_by_role("heading", name="Title")).to_be_visible()
        expect(last_answer(page)).to_contain_text("7 tokens")
        server.next_answer().say("More").finish()
        ask(page)
        expect(last_answer(page)).to_contain_text("More")

    def test_a_reload_in_the_midst_keeps_what_has_come(self, page: Page, server: ScriptedServer):
        answer = server.next_answer()
        ask(page)
        answer.say("Half of").until_closed()
        expect(last_answer(page)).to_contain_text("Half of")
        page.reload()
        assert answer.closed.wait(PATIENCE_S)
        expect(last_answer(page)).to_contain_text("Half of")
        done(page)

    def test_a_new_chat_and_the_old_one_back(self, page: Page, server: ScriptedServer):
        server.next_answer().say("Old answer").finish()
        ask(page)
        done(page)
        page.get_by_role("button", name="New chat").click()
        expect(page.get_by_text("Old answer")).to_have_count(0)
        page.reload()
        page.get_by_role("button", name="Bring back the last chat").click()
        expect(page.get_by_text("Old answer")).to_be_visible()

    @pytest.mark.parametrize("stored", ["{", "7", "[null, 3, {}]", '[{"role": "system", "content": "x"}]'])
    def test_spoiled_storage_is_an_empty_page(self, page: Page, server: ScriptedServer, stored: str):
        page.evaluate("text => ['messages', 'settings', 'key', 'previous'].forEach("
                      "name => localStorage.setItem('gapless.' + name, text))", stored)  # fmt: skip
        page.reload()
        server.next_answer().say("Fine").finish()
        ask(page)
        expect(last_answer(page)).to_contain_text("Fine")

    def test_full_storage_is_told_and_does_not_stop_the_chat(self, page: Page, server: ScriptedServer):
        page.evaluate(
            """() => {
              for (let size = 1 << 20, key = 0; size >= 1; size >>= 1) {
                try {
                  for (;;) localStorage.setItem(`filler ${key++}`, "x".repeat(size));
                } catch {}
              }
            }"""
        )
        server.next_answer().say("word " * 300_000).finish()
        ask(page)
        done(page)
        expect(page.get_by_text("The browser can't store this chat")).to_be_visible()
        expect(last_answer(page)).to_contain_text("word word")


class TestSettings:
    def test_parameters_are_sent_and_remembered(self, page: Page, server: ScriptedServer):
        panel = open_settings(page)
        panel.get_by_label("System prompt").fill("Be brief.")
        values = {
            "Temperature": "0.5",
            "Top p": "0.9",
            "Top k": "40",
            "Min p": "0.05",
            "Max tokens": "64",
            "Seed": "7",
        }
        for label, value in values.items():
            panel.get_by_label(label).fill(value)
        panel.get_by_label("Stop at").fill("END\n\\n\\n")
        page.reload()
        server.next_answer().say("Yes").finish()
        ask(page)
        request = server.next_request()
        assert request["messages"][0] == {"role": "system", "content": "Be brief."}
        expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 64, "seed": 7}
        assert {name: request[name] for name in expected} == expected
        assert request["stop"] == ["END", "\n\n"]
        done(page)

    def test_what_is_empty_is_not_sent(self, page: Page, server: ScriptedServer):
        panel = open_settings(page)
        panel.get_by_label("Temperature").fill("1")
        panel.get_by_role("button", name="Back to the defaults").click()
        panel.get_by_role("button", name="Close").click()
        expect(panel).to_be_hidden()
        server.next_answer().say("Yes").finish()
        ask(page)
        assert set(server.next_request()) == {"model", "messages", "stream", "stream_options"}
        done(page)


class TestTheServerSays:
    def test_its_error(self, page: Page, server: ScriptedServer):
        server.next_answer(400, "temperature must be at least 0, not -1 <b>")
        ask(page, "First")
        expect(last_answer(page).get_by_role("alert")).to_have_text(
            "temperature must be at least 0, not -1 <b>"
        )
        server.next_answer().say("Well").finish()
        ask(page, "Second")
        expect(last_answer(page)).to_contain_text("Well")
        server.next_request()
        assert server.next_request()["messages"] == [{"role": "user", "content": "First\n\nSecond"}]

    def test_an_error_in_the_midst(self, page: Page, server: ScriptedServer):
        server.next_answer().say("So far").fail("out of memory")
        ask(page)
        expect(last_answer(page).get_by_role("alert")).to_have_text("out of memory")
        expect(last_answer(page)).to_contain_text("So far")

    def test_nothing_any_more(self, page: Page, server: ScriptedServer):
        server.next_answer().say("So far").break_off()
        ask(page)
        expect(last_answer(page).get_by_role("alert")).to_contain_text("ended before the answer was complete")

    def test_that_it_is_overloaded(self, page: Page, server: ScriptedServer):
        server.next_answer(503, "Too many requests are waiting.")
        ask(page)
        expect(last_answer(page).get_by_role("alert")).to_have_text("Too many requests are waiting.")

    def test_that_it_is_loading(self, page: Page, server: ScriptedServer):
        server.stats |= {"status": "loading", "loading": 0.4}
        ask(page)
        expect(last_answer(page)).to_contain_text("The server is loading the model: 40 %")
        expect(last_answer(page).get_by_role("progressbar")).to_be_visible()
        expect(page.locator("#status")).to_contain_text("Loading the model 40 %")
        server.next_answer().say("Here I am").finish()
        server.stats |= {"status": "ok", "loading": 1.0}
        expect(last_answer(page)).to_contain_text("Here I am")
        done(page)

    def test_nothing_at_all(self, page: Page, context: BrowserContext):
        expect(page.locator("#status")).to_contain_text("running 3")
        context.route("**/v1/**", lambda route: route.abort("connectionrefused"))
        ask(page)
        expect(last_answer(page).get_by_role("alert")).to_contain_text("can't be reached")
        expect(page.get_by_role("button", name="Try again")).to_be_visible()

    def test_that_it_wants_a_key(self, page: Page, server: ScriptedServer):
        server.key = "s3cret"
        ask(page)
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Incorrect API key provided.")
        dialog.get_by_label("API key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("Incorrect API key provided.")
        server.next_answer().say("Welcome").finish()
        dialog.get_by_label("API key", exact=True).fill("s3cret")
        dialog.get_by_role("button", name="Use it").click()
        expect(last_answer(page)).to_contain_text("Welcome")
        done(page)
        server.guards_stats = True  # the key is known by now, and kept over a reload
        page.reload()
        expect(page.locator("#status")).to_contain_text("running 3 / 64")
        expect(dialog).to_be_hidden()

    def test_that_it_wants_a_key_and_none_is_given(self, page: Page, server: ScriptedServer):
        server.key, server.guards_stats = "s3cret", True
        page.reload()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        expect(page.locator("#status")).to_have_text("API key needed")
        open_settings(page).get_by_label("API key").fill("s3cret")
        page.keyboard.press("Tab")
        expect(page.locator("#status")).to_contain_text("running 3 / 64")

    def test_what_it_does(self, page: Page, server: ScriptedServer):
        expect(page.locator("#status span")).to_have_text(
            ["running 3 / 64", "waiting 0", "KV 12 %", "512 tok/s"]
        )
        expect(page.locator("#model")).to_have_text("tiny-llama")
        server.stats |= {"num_running": 4, "generation_tokens_per_s": 0.0}
        expect(page.locator("#status span")).to_have_text(["running 4 / 64", "waiting 0", "KV 12 %"])


def test_a_page_that_is_not_seen_asks_nothing(context: BrowserContext, server: ScriptedServer):
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/stats") else None)
    page.clock.install()
    page.goto(server.url)
    expect(page.locator("#status")).to_contain_text("running 3")
    see = "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });" \
        " document.dispatchEvent(new Event('visibilitychange')) }"  # fmt: skip
    page.evaluate(see, True)
    asked.clear()
    page.clock.run_for(10_000)
    assert asked == []
    server.stats |= {"num_running": 5}
    page.evaluate(see, False)
    expect(page.locator("#status")).to_contain_text("running 5")
    server.stats |= {"num_running": 6}
    page.clock.run_for(1_000)
    expect(page.locator("#status")).to_contain_text("running 6")


HOSTILE = """<script>alert(1)</script>
<img src=x onerror=alert(2)> <img src="http://203.0.113.1/a.png"> <svg onload=alert(3)>
<iframe src="http://203.0.113.1/"></iframe><style>body{display:none}</style>

[a](javascript:alert(4)) [b](JaVaScRiPt:alert(5)) [c](java\tscript:alert(6))
[d](data:text/html,<script>alert(7)</script>)
[e](\x01javascript:alert(8)) [f](<javascript:alert(9)>) [g](vbscript:x) [h](/v1/models) [i](//203.0.113.1/x)
[j](&#106;avascript:alert(1))
<javascript:alert(10)> ![k](javascript:alert(11)) ![pixel](http://203.0.113.1/pixel.png)
[![l](http://203.0.113.1/m.png)](javascript:alert(12))

| <script>alert(13)</script> | <b onmouseover=alert(14)>x</b><br> |
|---|---|
| [n](javascript:alert(15)) | `<img src=x onerror=alert(16)>` |

```html"><script>alert(17)</script>
<img src=x onerror=alert(18)><script>alert(19)</script>
```

- <a href="javascript:alert(20)">o</a>
> <form action="http://203.0.113.1/"><input autofocus onfocus=alert(21)></form>

````
<script>alert(22)</script>
```
</code></pre><script>alert(23)</script>"""


def test_an_answer_full_of_html_stays_text(page: Page, server: ScriptedServer):
    """The fixture sees to dialogs and to requests that leave."""
    answer = server.next_answer()
    ask(page, "<script>alert(0)</script><img src=x onerror=alert(0)>")
    answer.delta(reasoning_content=HOSTILE).say(*HOSTILE).until_closed()
    expect(last_answer(page)).to_contain_text("alert(23)")
    page.get_by_text("Thoughts").click()
    forbidden = "script, img, svg, iframe, style, form, input, b, [onerror], [onload], [style]"
    for _ in range(2):  # while it comes, and after a reload
        assert page.locator("#messages").locator(forbidden).count() == 0
        links = page.locator("#messages a").evaluate_all("links => links.map(link => link.href)")
        assert "http://203.0.113.1/pixel.png" in links
        assert {link for link in links if not link.startswith("http://203.0.113.1/")} == set()
        for text in (
            "<script>alert(1)</script>",
            "[a](javascript:alert(4))",
            "<img src=x onerror=alert(18)>",
        ):
            expect(last_answer(page)).to_contain_text(text)
        page.reload()


def test_right_to_left(page: Page, server: ScriptedServer):
    server.next_answer().say("שלום, world\n\n- مرحبا\n\n```\nx = 1\n```\n\nplain").finish()
    ask(page, "مرحبا")
    done(page)
    direction = "nodes => nodes.map(node => getComputedStyle(node).direction)"
    assert page.locator(".question .bubble").evaluate_all(direction) == ["rtl"]
    shown = last_answer(page).locator(".markdown > *").evaluate_all(direction)
    assert shown == ["rtl", "rtl", "ltr", "ltr"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_no_horizontal_scrolling(browser: Browser, server: ScriptedServer, scheme: str):
    phone = browser.new_context(
        viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True, color_scheme=scheme
    )
    page = phone.new_page()
    page.goto(server.url)
    wide = (
        "| "
        + " | ".join(f"column {i}" for i in range(12))
        + " |\n"
        + "|---" * 12
        + "|\n"
        + "| cell " * 12
        + "|\n"
    )
    server.next_answer().say(
        f"{'long' * 100}\n\n{wide}\n```\n{'code ' * 100}\n```\n\n{'# ' + 'x' * 300}"
    ).finish()
    ask(page, "w" * 400)
    done(page)
    overflow = "() => document.scrollingElement.scrollWidth - innerWidth"
    assert page.evaluate(overflow) <= 0
    assert page.locator("#scroller").evaluate("node => node.scrollWidth - node.clientWidth") <= 0
    open_settings(page)
    assert page.evaluate(overflow) <= 0
    phone.close()


def test_everything_can_be_named(page: Page, server: ScriptedServer):
    """Each control has a name for those who can't see it."""
    server.next_answer().say("```\ncode\n```\n").finish()
    ask(page)
    done(page)
    open_settings(page)
    nameless = page.evaluate(
        "() => [...document.querySelectorAll('button, input, textarea')].filter(node =>"
        " !node.textContent.trim() && !node.labels?.length && !node.ariaLabel).map(node => node.outerHTML)"
    )
    assert nameless == []
