"""The chat page's markdown in a browser: what it shows, that hostile text stays text, that it is quick."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import ScriptedServer

pytest.importorskip("playwright", reason="the chat page is tested with playwright")

from playwright.sync_api import Browser

# What is shown, as plain markup: <p>a <strong>b</strong></p>. Attributes and the bar over code are left out.
SHOWN = """
async (pieces) => {
  const { MarkdownView } = await import("/page/markdown.js");
  const show = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    if (node.matches(".code-bar")) return "";
    const tag = node.localName;
    const inside = [...node.childNodes].map(show).join("");
    if (tag === "div") return inside;
    if (tag === "br" || tag === "hr") return `<${tag}>`;
    const extra = tag === "a" ? " " + node.href : tag === "ol" && node.start !== 1 ? " " + node.start : "";
    return `<${tag}${extra}>${inside}</${tag}>`;
  };
  const root = document.createElement("div");
  const view = new MarkdownView(root);
  for (const piece of pieces) {
    view.append(piece);
    view.render();
  }
  return [...root.childNodes].map(show).join("");
}
"""

Show = Callable[..., str]


@pytest.fixture(scope="module")
def evaluate(browser: Browser, running_server: ScriptedServer) -> Iterator[Callable[..., Any]]:
    page = browser.new_page()
    page.goto(running_server.url)
    yield page.evaluate
    page.close()


@pytest.fixture(scope="module")
def show(evaluate: Callable[..., Any]) -> Show:
    return lambda *pieces: evaluate(SHOWN, pieces)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("  \n\n ", ""),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("one\r\ntwo", "<p>one<br>two</p>"),
        ("# One\n### Three ###\n#hash", "<h3>One</h3><h5>Three</h5><p>#hash</p>"),
        ("###### Six\n####### seven", "<h6>Six</h6><p>####### seven</p>"),
        ("text\n---\n***\n- - -", "<p>text</p><hr><hr><hr>"),
        ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
        ("*a* **b** ***c*** ~~d~~ _e_ __f__", "<p><em>a</em> <strong>b</strong> <em><strong>c</strong></em> "
         "<del>d</del> <em>e</em> <strong>f</strong></p>"),
        ("snake_case_name 2*3*4 a * b * c", "<p>snake_case_name 2<em>3</em>4 a * b * c</p>"),
        ("**2*3 = 6** and **open", "<p><strong>2*3 = 6</strong> and **open</p>"),
        ("**重要**です **「注意」**です", "<p><strong>重要</strong>です <strong>「注意」</strong>です</p>"),
        ("*a **b* c**", "<p><em>a <em><em>b</em> c</em></em></p>"),
        ("`a` ``b ` c`` `` ` `` `open", "<p><code>a</code> <code>b ` c</code> <code>`</code> `open</p>"),
        (r"\*a\* \`b\` \\ C:\dir", r"<p>*a* `b` \ C:\dir</p>"),
        (r"\(a_1 * b_2 * c\) $$x_1^2_y$$ \[z*z*z",
         r"<p><span>\(a_1 * b_2 * c\)</span> "
         r"<span>$$x_1^2_y$$</span> \[z<em>z</em>z</p>"),
        ("$5 and $$6", "<p>$5 and $$6</p>"),
    ],
)  # fmt: skip
def test_text(show: Show, text: str, shown: str):
    assert show(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[a *b*](https://x.org/?q=1 'title')", "<p><a https://x.org/?q=1>a <em>b</em></a></p>"),
        ("[a](<https://x.org/a b>) [b](https://x.org/f(x))",
         "<p><a https://x.org/a%20b>a</a> <a https://x.org/f(x)>b</a></p>"),
        ("see https://x.org/a_b_c, (https://x.org/f(x)). <https://y.org>",
         "<p>see <a https://x.org/a_b_c>https://x.org/a_b_c</a>, "
         "(<a https://x.org/f(x)>https://x.org/f(x)</a>). "
         "<a https://y.org/>https://y.org</a></p>"),
        ("**https://x.org**", "<p><strong><a https://x.org/>https://x.org</a></strong></p>"),
        ("[https://x.org](https://y.org)", "<p><a https://y.org/>https://x.org</a></p>"),
        ("[a [b](https://x.org) c](https://y.org)",
         "<p>[a <a https://x.org/>b</a> c](<a https://y.org/>https://y.org</a>)</p>"),
        ("![cat](https://x.org/cat.png) ![](https://x.org/)",
         "<p><a https://x.org/cat.png>cat</a> <a https://x.org/>https://x.org/</a></p>"),
        ("[![b](https://x.org/b.png)](https://y.org)", "<p><a https://y.org/>b</a></p>"),
        ("[mail](mailto:a@x.org) [a][1] [b] (https://", "<p><a mailto:a@x.org>mail</a> [a][1] [b] (https://</p>"),
    ],
)  # fmt: skip
def test_links(show: Show, text: str, shown: str):
    assert show(text) == shown


ADDRESSES = [
    "javascript:alert(1)", "JAVASCRIPT:alert(1)", " javascript:alert(1)", "java\tscript:alert(1)",
    "\x01javascript:alert(1)", "<javascript:alert(1)>", "javascript&colon;alert(1)",
    "&#106;avascript:alert(1)", r"javascript\:alert(1)", "vbscript:x", "data:text/html,x", "blob:x",
    "file:///etc/passwd", "view-source:x", "/v1/models", "//x.org", "#id", "", "https://", "x",
    "page/main.js", "intent://x#Intent;end", "tel:1",
]  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("form", ["[text]({})", "![text]({})", "[text](<{}>)", "<{}>"])
def test_other_addresses_are_no_links(show: Show, address: str, form: str):
    assert "<a " not in show(form.format(address))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("* a\n\n* b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
        ("3. a\n4. b", "<ol 3><li>a</li><li>b</li></ol>"),
        ("1) a\n- b", "<ol><li>a</li></ol><ul><li>b</li></ul>"),
        ("- a\n  - b\n    - c\n- d", "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>"),
        ("1. a\n  - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
        ("1. **a**\n\n   text\n\n2. b",
         "<ol><li><p><strong>a</strong></p><p>text</p></li><li><p>b</p></li></ol>"),
        ("1. a\n   ```sh\n   ls\n     -l\n   ```\n2. b",
         "<ol><li>a<pre><code>ls\n  -l</code></pre></li><li>b</li></ol>"),
        ("1. a\n```\nx\n```\n2. b", "<ol><li>a</li></ol><pre><code>x</code></pre><ol 2><li>b</li></ol>"),
        ("- a\nb\n\nc", "<ul><li>a<br>b</li></ul><p>c</p>"),
        ("text:\n- a", "<p>text:</p><ul><li>a</li></ul>"),
        ("in\n1984. Yes", "<p>in<br>1984. Yes</p>"),
        ("- [ ] a\n- [x] b", "<ul><li>☐ a</li><li>☑ b</li></ul>"),
        ("-\n- a\n-b", "<ul><li></li><li>a<br>-b</li></ul>"),
        ("- a\n\t- b", "<ul><li>a<ul><li>b</li></ul></li></ul>"),
    ],
)  # fmt: skip
def test_lists(show: Show, text: str, shown: str):
    assert show(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("```py\na < b\n\n  c\n```\nd", "<pre><code>a < b\n\n  c</code></pre><p>d</p>"),
        ("~~~\n```\n~~~", "<pre><code>```</code></pre>"),
        ("````md\n```js\nx\n```\n````", "<pre><code>```js\nx\n```</code></pre>"),
        ("```\nopen <script>", "<pre><code>open <script></code></pre>"),
        ("```", "<pre><code></code></pre>"),
        ("``` not a fence ```", "<p><code>not a fence</code></p>"),
        ("    a\n\n      b\nc", "<pre><code>a\n\n  b</code></pre><p>c</p>"),
        ("text\n    goes on", "<p>text<br>goes on</p>"),
        ("```\n</code></pre><b>x</b>\n```", "<pre><code></code></pre><b>x</b></code></pre>"),
    ],
)
def test_code(show: Show, text: str, shown: str):
    assert show(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b\n-|:-:\n1|`2`", "<table><thead><tr><th>a</th><th>b</th></tr></thead>"
         "<tbody><tr><td>1</td><td><code>2</code></td></tr></tbody></table>"),
        ("text\n| a |\n|---|\n| b \\| c | d |\n\nend", "<p>text</p><table><thead><tr><th>a</th></tr></thead>"
         "<tbody><tr><td>b | c</td></tr></tbody></table><p>end</p>"),
        ("|a|b|\n|-|-|\n|c|\n|d<br>e|<b>|", "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody>"
         "<tr><td>c</td><td></td></tr><tr><td>d<br>e</td><td><b></td></tr></tbody></table>"),
        ("| a | b |\n|---|", "<p>| a | b |<br>|---|</p>"),
        ("a | b\nc | d", "<p>a | b<br>c | d</p>"),
    ],
)  # fmt: skip
def test_tables(show: Show, text: str, shown: str):
    assert show(text) == shown


FRAGMENTS = [
    "\n", "\n\n", " ", "  ", "    ", "\t", "a", "word", "*", "**", "***", "_", "~~", "`", "```", "```py\n",
    "~~~", "#", "## ", "> ", "- ", "* ", "1. ", "2) ", "-", "---", "=", "|", "|-|", "|---|---|\n", ":-:",
    "[", "](", "](https://x.org", ")", "![", "]", "https://x.org", "<", ">", "<br>", "<script>", "\\",
    "\\(", "\\)", "\\[", "$$", "é", "שלום", "🎈", "\r\n", "[ ] ", "&lt;",
]  # fmt: skip


@settings(max_examples=300)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=60))
def test_a_text_that_comes_piece_by_piece_looks_like_the_whole(show: Show, pieces: list[str]):
    assert show(*pieces) == show("".join(pieces))


REPEATED = [
    "*a ", "**a", "a**", "_a ", "*a_ ", "~~", "`", "` ``", "[", "![", "[a](", "[a](b", "[a](https://x.org/",
    "![a](https://x.org) ", "<", "<https://", "\\(", "$$a", "https://", "((((https://x.org/)", "> ", ">",
    "> #\n", "- ", "1. ", "  - ", "|", "|a\n|-", "#", "# #", "```\n", "***", "\n", "\n\n- a\n\n", " ",
    "    a\n\n", "a\n", "-\n", "\\", "]", "*_~~`[", "\u202e", "🎈",
]  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "text",
    [
        *((piece * 200_000)[:200_000] for piece in REPEATED),
        f"[{'`a` ' * 200_000}](https://x.org)",
        "|" * 200_000 + "\n" + "|-" * 199_999,
    ],
    ids=[*map(repr, REPEATED), "much in a link", "many columns"],
)
def test_no_text_makes_the_page_hang(evaluate: Callable[..., Any], text: str):
    """Each takes about a second; work that grows with the square of the length would take many minutes."""
    depth = evaluate(
        """async (text) => {
          const { renderMarkdown } = await import("/page/markdown.js");
          const root = document.createElement("div");
          renderMarkdown(root, text);
          const depth = (node) => {
            let deepest = 0;
            for (const child of node.children) deepest = Math.max(deepest, 1 + depth(child));
            return deepest;
          };
          return depth(root);
        }""",
        text,
    )
    assert depth < 100


def test_finished_blocks_are_left_alone(evaluate: Callable[..., Any]):
    """Only the last block is made anew while an answer comes, and long code only grows."""
    kept = evaluate(
        """async () => {
          const { MarkdownView } = await import("/page/markdown.js");
          const root = document.createElement("div");
          const view = new MarkdownView(root);
          view.append("# One\\n\\ntwo\\n\\n```\\ncode\\n");
          view.render();
          const [one, two, code] = root.children;
          const text = code.querySelector("code").firstChild;
          view.append("more\\n");
          view.render();
          return one === root.children[0] && two === root.children[1] && code === root.children[2]
            && text === code.querySelector("code").firstChild && text.data === "code\\nmore\\n";
        }"""
    )
    assert kept
