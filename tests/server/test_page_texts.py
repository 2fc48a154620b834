"""Texts of a model on the page at /, in a browser: what is hostile, what markdown becomes, what could take long."""

import re
from typing import Any

import pytest

from tests.server.browser import answering, answers, opened, say, sse
from tests.server.conftest import Running

expect: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
pytestmark = pytest.mark.battery


HOSTILE = """<script>alert(1)</script><img src=x onerror=alert(2)><iframe src="javascript:alert(3)"></iframe>
<svg onload=alert(4)><a href="javascript:alert(5)">x</a>

[a](javascript:alert(6)) [b](data:text/html,<script>alert(7)</script>) [c]( javascript:alert(8)) ![d](http://evil.test/pixel.png)
[e](JaVaScRiPt:alert(9)) [f](//evil.test) [g](https://evil.test/" onclick="alert(10)) <https://evil.test/?<script>>

```html"><script>alert(11)</script>
</code></pre><script>alert(12)</script>
```

| <b onmouseover=alert(13)>x</b> | y |
|---|---|
| `<script>alert(14)</script>` | [z](vbscript:alert(15)) |
"""


def test_hostile_texts_stay_texts(page: Any) -> None:
    call = {"index": 0, "id": HOSTILE, "function": {"name": HOSTILE, "arguments": HOSTILE}}
    answering(page, sse({"reasoning_content": HOSTILE}, {"content": HOSTILE}, {"tool_calls": [call]}))
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": HOSTILE, "max_model_len": 5}]}))
    opened(page)
    say(page, HOSTILE)
    expect(answers(page).locator(".call")).to_contain_text("alert(12)")
    page.get_by_role("button", name="New").click()
    page.get_by_label("Conversation to show").select_option(index=1)
    expect(answers(page)).to_contain_text("alert(14)")
    made = page.evaluate("[...document.querySelectorAll('main *')].map(one => one.localName)")
    assert not {"script", "img", "iframe", "object", "embed", "style", "link", "base", "b"} & set(made)
    for message in page.locator(".message").all():
        names = message.evaluate("one => [...one.querySelectorAll('*')].flatMap(each => each.getAttributeNames())")
        assert not any(name.startswith("on") for name in names)
    links = page.locator("main a").evaluate_all("links => links.map(link => [link.href, link.rel])")
    assert links
    assert all(re.match(r"https?://evil\.test/", href) and rel == "noopener noreferrer" for href, rel in links)


def test_the_browser_keeps_the_policy_of_the_page(browser: Any, running: Running) -> None:
    """So that a mistake of the page would do no harm either."""
    context = browser.new_context(base_url=running.url)
    page = context.new_page()
    opened(page)
    done = page.evaluate("""async () => {
        const works = async act => { try { await act(); return true } catch { return false } };
        const attempts = [
            () => { document.body.innerHTML = "<b>x</b>" },
            () => { document.createElement("script").text = "1" },
            () => document.body.setAttribute("onclick", "1"),
            () => setTimeout("1"),
            () => fetch("http://127.0.0.1:1/"),
        ];
        return await Promise.all(attempts.map(works));
    }""")
    assert done == [False] * 5
    context.close()


def test_markdown(page: Any) -> None:
    cases = {
        "a **b** *c* `d*e*` ~~f~~": "<p>a <strong>b</strong> <em>c</em> <code>d*e*</code> <del>f</del></p>",
        "__g__ _h_ i_j_k 2*3*4": "<p><strong>g</strong> <em>h</em> i_j_k 2<em>3</em>4</p>",
        "# One #\n## Two": "<h3>One</h3><h4>Two</h4>",
        "one\ntwo\\*": "<p>one<br>two*</p>",
        "- a\n  - b\n- c": "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>",
        "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
        "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
        "---": "<hr>",
        "a & b < c": "<p>a &amp; b &lt; c</p>",
        "``a`b`` ` c": "<p><code>a`b</code> ` c</p>",
        "* unfinished **bold": "<ul><li>unfinished **bold</li></ul>",
        "![x](http://a.test/b.png)": '<p><a href="http://a.test/b.png" target="_blank" rel="noopener noreferrer" '
        'title="http://a.test/b.png">x</a></p>',
        "|a|b|\n|-|:-:|\n|1|2|": '<div class="wide" tabindex="0"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
        "<tbody><tr><td>1</td><td>2</td></tr></tbody></table></div>",
    }
    shown = page.evaluate("""async texts => {
        const {showMarkdown} = await import("/page/markdown.js");
        return texts.map(text => {
            const [whole, grown] = [document.createElement("div"), document.createElement("div")];
            showMarkdown(whole, text);
            for (let end = 0; end <= text.length; end++) showMarkdown(grown, text.slice(0, end));
            return [[...whole.children].map(one => one.innerHTML).join(""), whole.innerHTML === grown.innerHTML];
        });
    }""", list(cases))  # fmt: skip
    assert shown == [[html, True] for html in cases.values()]
    code = page.evaluate("""async text => {
        const {showMarkdown} = await import("/page/markdown.js");
        const shown = document.createElement("div");
        showMarkdown(shown, text);
        const of = (figure, name) => figure.querySelector(name).textContent;
        return [...shown.querySelectorAll("figure")].map(one => [of(one, "span"), of(one, "code")]);
    }""", "```python x\na\n\n  b\n```\n~~~~\n```\n~~~~\n  ```\n  c\n    d\n  ```\n```unfinished\ne")  # fmt: skip
    assert code == [["python", "a\n\n  b"], ["text", "```"], ["text", "c\n  d"], ["unfinished", "e"]]


def test_long_and_deep_texts_take_no_time(page: Any) -> None:
    pieces = (
        *("*", "**a ", "_a", "`", "``a", "[", "[a](", "![", "<http://", "http://", "~~a", "> ", "- ", "* ", "#", "# #"),
        *("|", "|-", "~", "```a", " ", "\\", "1. ", "**_~~", "  - a\n", "a\n", "> a\n", "\u202e", "[[a](b)"),
    )
    for piece in pieces:
        seconds = page.evaluate("""async text => {
            const {showMarkdown} = await import("/page/markdown.js");
            const shown = document.createElement("div"), started = performance.now();
            for (const end of ["", "`", "x\\n|-|"]) showMarkdown(shown, text + end);
            return (performance.now() - started) / 1000;
        }""", piece * (100_000 // len(piece)))  # fmt: skip
        assert seconds < 3, piece
