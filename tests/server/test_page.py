"""The page at /: what the server sends. ``test_page_in_browser.py`` and ``test_page_texts.py`` run it in a browser."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from compiled_llm import CompiledEngine
from compiled_llm.openai.requests import FIELDS
from compiled_llm.server.page import _DIRECTORY, PAGE_PATHS
from tests.server.conftest import Running, running_with

TEXTS = {path.name: path.read_text() for path in _DIRECTORY.iterdir()}
SCRIPTS = {name: text for name, text in TEXTS.items() if name.endswith(".js")}


class Tags(HTMLParser):
    """``found``: each tag's name and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))


def test_files_have_their_types_and_are_sent_once(running: Running) -> None:
    types = {"/": "text/html", "/page/style.css": "text/css", "/page/main.js": "text/javascript",
             "/page/icon.svg": "image/svg+xml"}  # fmt: skip
    assert types.keys() <= PAGE_PATHS
    for path in PAGE_PATHS:
        answer = running.http.get(path)
        assert answer.status_code == 200
        assert answer.text == TEXTS[path.removeprefix("/page/") if path != "/" else "index.html"]
        assert answer.headers["content-type"] == f"{types.get(path, 'text/javascript')}; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = running.http.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert running.http.get(path, headers={"if-none-match": '"another"'}).status_code == 200
        assert running.http.head(path).headers["content-length"] == str(len(answer.content))


def test_the_policy_of_the_page_allows_its_own_server_alone(running: Running) -> None:
    policy = dict(
        part.strip().split(" ", 1) for part in running.http.get("/").headers["content-security-policy"].split(";")
    )
    assert policy.pop("default-src") == "'none'"
    assert {policy.pop(f"{kind}-src") for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert {policy.pop(name) for name in ("base-uri", "form-action", "frame-ancestors", "trusted-types")} == {"'none'"}
    assert policy == {"require-trusted-types-for": "'script'"}


def test_it_needs_no_key_and_gives_away_nothing_else(engine: CompiledEngine) -> None:
    with running_with(engine, api_key=("secret",)) as running:
        for path in PAGE_PATHS:
            assert running.http.get(path).status_code == 200
            assert "secret" not in running.http.get(path).text
        others = ("/page/", "/page", "/page/../v1/models", "/page/%2e%2e/metrics", "/page/main.js/", "/static/main.js")
        for path in others:
            assert running.http.get(path).status_code == 401, path
        assert running.http.post("/").status_code == 405


def test_there_is_no_script_in_the_html_and_no_address_of_others() -> None:
    for tag, attributes in Tags(TEXTS["index.html"]).found:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        assert tag != "script" or attributes["src"]
        for name in ("src", "href"):
            if name in attributes:
                assert f"/{attributes[name]}" in PAGE_PATHS, attributes
    for name, text in TEXTS.items():
        known = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://\w|[\"'(]//\w", known), name
        assert not re.search(r"@import|url\(", known), name


def test_no_text_becomes_html_or_code() -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser|Fragment\(|\beval\b|Function\("
    for name, text in SCRIPTS.items():
        assert not re.search(ways, text), name
        assert not re.search(r"setAttribute\(\"(href|src|style|on)", text), name
    assert {name for name, text in SCRIPTS.items() if "href" in text} == {"markdown.js", "store.js"}


def test_the_scripts_find_each_other_and_what_the_page_has() -> None:
    ids = {attributes["id"] for _, attributes in Tags(TEXTS["index.html"]).found if "id" in attributes}
    exported = {name: set(re.findall(r"export (?:async )?(?:function\*?|class|const) (\$|\w+)", text))
                for name, text in SCRIPTS.items()}  # fmt: skip
    for name, text in SCRIPTS.items():
        for names, other in re.findall(r"^import \{(.*?)\} from \"\./(.*?)\";$", text, re.MULTILINE):
            assert set(names.split(", ")) <= exported[other], name
        assert set(re.findall(r"\$\(\"([\w-]+)\"\)", text)) <= ids, name


def test_it_asks_for_metrics_and_fields_that_there_are(running: Running) -> None:
    assert running.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    served = running.http.get("/metrics").text
    asked = re.findall(r"\"((?:vllm|compiled_llm):\w+)\"", TEXTS["server.js"])
    assert len(asked) > 15
    for name in asked:
        names = (f"{name}_sum", f"{name}_count") if name.endswith("_seconds") else (name,)
        is_known = all(f"\n{one}{{" in served for one in names)
        assert is_known or name in ("compiled_llm:limit_seconds_total", "compiled_llm:device_seconds_total"), name
    fields = re.findall(r"^  \[\"(\w+)\", ", TEXTS["settings.js"], re.MULTILINE)
    assert len(fields) == 9
    assert set(fields) <= set(FIELDS["chat"]) & set(FIELDS["completion"])


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_files_are_short_and_of_plain_lines(name: str) -> None:
    lines = TEXTS[name].splitlines()
    assert len(lines) < 300
    assert name.endswith(".svg") or max(map(len, lines)) <= 160
