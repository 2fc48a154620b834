"""The page at / in a browser: all that one can do there.

Answers come from the demo model, or, where the words matter, from a route that the browser takes for the server.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine
from tests.server.browser import answering, answers, ended, opened, say, sse, text_of
from tests.server.conftest import Running, running_with

expect: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
pytestmark = pytest.mark.battery


# -- Chat


def test_an_answer_streams_and_says_how_fast(page: Any, running: Running) -> None:
    say(page, "Add two numbers", Max_tokens="480", Temperature="0")
    stats = answers(page).locator(".stats")
    expect(stats).to_have_text(re.compile(r"first token \d+ ms · \d+ tokens? · [\d.]+ tokens/s · prompt of \d+"))
    early = text_of(answers(page))
    ended(page)
    body = {"messages": [{"role": "user", "content": "Add two numbers"}], "max_tokens": 480, "temperature": 0}
    whole = running.http.post("/v1/chat/completions", json=body).json()
    shown = page.evaluate(
        "JSON.parse(localStorage[Object.keys(localStorage).find(n => n.includes('conversation'))]).messages[1]"
    )
    assert shown["content"] == whole["choices"][0]["message"]["content"]
    assert shown["stats"]["tokens"] == whole["usage"]["completion_tokens"]
    assert len(early) < len(shown["content"]), "it was seen while it came"


def test_stopping_keeps_what_has_come_and_ends_the_request(page: Any, running: Running) -> None:
    def never_ending(route: Any) -> None:
        route.continue_(post_data=json.dumps({**json.loads(route.request.post_data), "ignore_eos": True}))

    page.route("**/v1/chat/completions", never_ending)
    for stop in (lambda: page.keyboard.press("Escape"), page.get_by_role("button", name="Stop").click):
        say(page, "Write a long class", Max_tokens="500")
        expect(answers(page).last.locator(".stats")).to_contain_text("tokens/s")
        stop()
        ended(page)
        expect(answers(page).last.locator(".stats")).to_contain_text("stopped")
        assert text_of(answers(page).last)
        while running.http.get("/load").json()["server_load"]:
            pass


def test_edit_retry_regenerate_and_continue(page: Any) -> None:
    asked = answering(page, *(sse({"content": text}) for text in ("one", "two", "three", "four", " and more")))
    say(page, "first")
    expect(answers(page)).to_contain_text("one")
    say(page, "second")
    expect(answers(page).last).to_contain_text("two")
    page.get_by_role("button", name="Regenerate").last.click()
    expect(answers(page).last).to_contain_text("three")
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Text of the message").fill("another")
    page.get_by_label("Text of the message").press("Control+Enter")
    expect(answers(page)).to_have_count(1)
    expect(answers(page)).to_contain_text("four")
    answers(page).get_by_role("button", name="Edit").click()
    page.get_by_label("Text of the message").fill("mine")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("button", name="Continue").click()
    expect(answers(page)).to_contain_text("mine and more")
    contents = [[message["content"] for message in one["messages"]] for one in asked]
    assert contents == [
        ["first"],
        ["first", "one", "second"],
        ["first", "one", "second"],
        ["another"],
        ["another", "mine"],
    ]
    assert asked[-1]["continue_final_message"] is True
    page.get_by_role("button", name="Retry").click()
    expect(answers(page)).to_contain_text("and more")
    assert asked[-1]["messages"] == [{"role": "user", "content": "another"}]


def test_settings_are_sent_and_kept(page: Any) -> None:
    asked = answering(page, sse({"content": "so"}))
    values = {"Temperature": "0.5", "Top_p": "0.9", "Top_k": "40", "Min_p": "0.05", "Max_tokens": "77", "Seed": "1",
              "Presence_penalty": "0.1", "Frequency_penalty": "0.2", "Repetition_penalty": "1.1"}  # fmt: skip
    page.get_by_label("System prompt").fill("Be short.")
    say(page, "hello", **values)
    expect(answers(page)).to_contain_text("so")
    assert {name: asked[0][name.lower()] for name in values} == {name: float(value) for name, value in values.items()}
    assert asked[0]["messages"][0] == {"role": "system", "content": "Be short."}
    assert (asked[0]["model"], asked[0]["stream"]) == ("compiled-llm-demo", True)
    opened(page)
    expect(page.get_by_label("Top k")).to_have_value("40")
    page.get_by_role("button", name="Reset settings").click()
    expect(page.get_by_label("Top k")).to_have_value("")
    say(page, "again")
    expect(answers(page)).to_have_count(2)
    assert "top_k" not in asked[1]


def test_probabilities_of_tokens(page: Any) -> None:
    page.get_by_label("Colour tokens by their probability").check()
    say(page, "Add two numbers", Max_tokens="12", Temperature="0")
    ended(page)
    tokens = answers(page).locator(".tokens span")
    assert tokens.count() >= 12
    doubts = tokens.evaluate_all("spans => spans.map(one => Number(one.style.getPropertyValue('--doubt')))")
    assert all(0 <= doubt < 1 for doubt in doubts)
    assert len(set(doubts)) > 5
    for come in (tokens.nth(4).hover, tokens.nth(5).focus):
        come()
        rows = page.get_by_role("tooltip").locator("tr")
        expect(rows).to_have_count(5)
        expect(rows.first).to_have_class("chosen")  # of temperature 0
        expect(rows.first).to_contain_text("%")
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(6)).to_be_focused()
    page.get_by_label("Colour tokens by their probability").uncheck()
    expect(answers(page).locator(".tokens")).to_have_count(0)
    page.get_by_role("combobox", name="Mode").select_option("text")
    page.get_by_label("Colour tokens by their probability").check()
    page.get_by_role("button", name="New").click()
    say(page, "import os\n")
    ended(page)
    assert answers(page).locator(".tokens span").count() >= 12


def test_reasoning_and_calls_of_tools(page: Any) -> None:
    def call(**more: Any) -> Any:
        return {"tool_calls": [{"index": 0, **more}]}

    deltas = (
        {"reasoning_content": "The tool "},
        {"reasoning_content": "knows."},
        call(id="call_1", type="function", function={"name": "weather", "arguments": ""}),
        call(function={"arguments": '{"city":'}),
        call(function={"arguments": ' "Oslo"}'}),
    )
    asked = answering(page, sse(*deltas, end="tool_calls"), sse({"reasoning": "Done."}, {"content": "It **snows**."}))
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    page.get_by_label("Tools, as a JSON list").fill(json.dumps(tools))
    say(page, "How is the weather?")
    expect(answers(page).locator("details")).to_contain_text("The tool knows.")
    expect(answers(page).locator(".call")).to_contain_text('"city": "Oslo"')
    expect(answers(page).locator(".stats")).to_contain_text("calls tools")
    page.get_by_label("Result of weather").fill("-3 and snow")
    page.get_by_role("button", name="Send results").click()
    expect(answers(page).last.locator("strong")).to_have_text("snows")
    expect(answers(page).last.locator("details")).not_to_have_attribute("open", "")
    assert asked[0]["tools"] == tools
    *_, called, result = asked[1]["messages"]
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert called["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]
    assert result == {"role": "tool", "content": "-3 and snow", "tool_call_id": "call_1"}
    page.get_by_label("Tools, as a JSON list").fill("[nonsense")
    say(page, "again")
    expect(page.get_by_role("alert")).to_have_text("The tools of the settings must be a list in JSON.")


def test_conversations_are_kept_exported_and_imported(page: Any, tmp_path: Path) -> None:
    answering(page, sse({"content": "kept"}))
    say(page, "the first one")
    expect(answers(page)).to_contain_text("kept")
    opened(page)
    expect(answers(page)).to_contain_text("kept")
    page.get_by_role("button", name="New").click()
    expect(answers(page)).to_have_count(0)
    say(page, "the second one")
    ended(page)
    names = page.get_by_label("Conversation to show").locator("option")
    expect(names).to_have_text(["the second one", "the first one"])
    page.get_by_label("Conversation to show").select_option(label="the first one")
    expect(page.get_by_role("article", name="You")).to_contain_text("the first one")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "kept.json")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete").click()
    expect(names).to_have_text(["New conversation"])
    page.locator("#file").set_input_files(tmp_path / "kept.json")
    expect(answers(page)).to_contain_text("kept")
    sound = {"role": "assistant", "content": "a"}
    bad = (
        {"content": {}},
        {"role": "x"},
        {"stats": {"rate": "1"}},
        {"tool_calls": [{}]},
        {"tokens": [["a", "b", []]]},
        {"error": 1},
    )
    for number, fields in enumerate(bad):
        path = tmp_path / f"bad{number}.json"
        path.write_text(json.dumps({"messages": [{**sound, **fields}]}))
        page.locator("#file").set_input_files(path)
        expect(page.locator("#notice")).to_have_text(f"{path.name} is no conversation that this page has exported.")
    page.evaluate("localStorage['compiled-llm.conversation.x'] = '{'; localStorage['compiled-llm.settings'] = '7'")
    opened(page)
    expect(answers(page)).to_contain_text("kept")


def test_a_model_without_chat_template_goes_on_with_text(page: Any) -> None:
    page.route("**/tokenize", lambda route: route.fulfill(
        status=400, body='{"error": {"message": "the model has no chat template: give one"}}'))  # fmt: skip
    opened(page)
    expect(page.locator("#notice")).to_contain_text("no chat template")
    expect(page.get_by_role("combobox", name="Mode")).to_be_disabled()
    say(page, "import os\n", Max_tokens="6", Temperature="0")
    ended(page)
    with page.expect_request("**/v1/completions") as asked:
        say(page, "\nimport re")
    text = text_of(answers(page).first)
    assert json.loads(asked.value.post_data)["prompt"] == f"import os\n{text}\nimport re"
    ended(page)


# -- What goes wrong


def test_errors_are_said_in_words(page: Any) -> None:
    alert = page.get_by_role("alert")
    say(page, "hello", Top_p="7")
    expect(alert).to_contain_text("top_p must be")
    cut = sse({"content": "half"}).partition("data: [DONE]")[0]
    cases = (
        (cut + 'data: {"error": {"message": "the engine has ended", "code": null}}\n\n', 200, "the engine has ended"),
        (cut, 200, "The server broke off its answer."),
        ('{"error": {"message": "128 prompts wait already"}}', 429, "128 prompts wait already"),
        ("<html>", 502, "The server answers with status 502."),
    )
    for body, status, words in cases:
        page.unroute_all()
        answering(page, body, status=status)
        say(page, "hello")
        expect(alert.last).to_contain_text(words)
    page.unroute_all()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    say(page, "hello")
    expect(alert.last).to_have_text("The server does not answer. Does it still run?")
    page.unroute_all()
    page.get_by_label("Top p").fill("1")
    page.get_by_role("button", name="Regenerate").last.click()
    ended(page)
    expect(alert).to_have_count(5)


def test_the_key_is_asked_for_and_kept_in_the_tab(browser: Any, engine: CompiledEngine) -> None:
    with running_with(engine, api_key=("secret",)) as running:
        context = browser.new_context(base_url=running.url)
        page = context.new_page()
        page.goto("/")
        for key, words in (("wrong", "The server needs a key"), ("secret", "The server does not know this key")):
            expect(page.get_by_role("dialog", name=words)).to_be_visible()
            page.get_by_label("Key", exact=True).fill(key)
            page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("compiled-llm-demo")
        say(page, "hello", Max_tokens="4")
        ended(page)
        expect(answers(page).locator(".stats")).to_contain_text("4 tokens")
        opened(page)
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert "secret" not in json.dumps(page.evaluate("({...localStorage})"))
        other = context.new_page()
        other.goto("/")
        expect(other.get_by_role("dialog")).to_be_visible()
        context.close()


# -- Server


def test_the_other_tab_shows_what_moves(page: Any, running: Running) -> None:
    page.get_by_role("tab", name="Server").click()
    before = page.get_by_role("row", name="Tokens generated").get_by_role("cell")
    expect(before).to_be_visible()
    count = int(before.inner_text().replace(",", ""))
    body = {"prompt": ["def f(x):"] * 20, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with running.http.stream("POST", "/v1/completions", json=body) as answer:
        expect(page.get_by_label("Requests: running")).to_have_text("4")
        expect(page.get_by_label("Tokens a second: generated")).to_have_text(re.compile("[1-9]"))
        expect(page.get_by_label("KV cache in use: now")).to_have_text(re.compile(r"[1-9].*%"))
        expect(page.get_by_label("Time of a step: mean")).to_have_text(re.compile("[1-9].* ms"))
        answer.read()
    expect(page.get_by_label("Requests: running")).to_have_text("0")
    expect(before).to_have_text(f"{count + 8000:,}")
    expect(page.locator("#facts")).to_have_text("compiled-llm-demo: at most 512 tokens · uncompiled")
    paths = page.locator("#tiles path").evaluate_all("paths => paths.map(path => path.getAttribute('d'))")
    assert sum("L" in path for path in paths) >= 5
    assert not any("NaN" in path for path in paths)


def test_compile_state_and_share_of_the_limit(page: Any) -> None:
    readings = iter(range(1, 1000))

    def answer(route: Any) -> None:
        n = next(readings)
        values = {
            "graphs": 5,
            "graphs_pending": 3 if n < 4 else 0,
            "limit_seconds_total": 0.25 * n,
            "device_seconds_total": n,
        }
        route.fulfill(body="".join(f'compiled_llm:{name}{{engine="0"}} {value}\n' for name, value in values.items()))

    page.route("**/metrics", answer)
    page.get_by_role("tab", name="Server").click()
    expect(page.locator("#facts")).to_contain_text("compiling: 2 of 5 graphs are ready")
    expect(page.get_by_label("Share of the machine's limit: mean")).to_have_text("25%")
    expect(page.locator("#facts")).to_contain_text("compiled: 5 graphs")
    page.unroute_all()
    page.route("**/metrics", lambda route: route.abort())
    expect(page.get_by_role("alert")).to_have_text("The server does not answer. Does it still run?")


# -- Everyone can use it


def test_all_of_it_by_keyboard(page: Any) -> None:
    answering(page, sse({"content": "yes"}))
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("article", name="You")).to_contain_text("one\ntwo")
    expect(answers(page)).to_contain_text("yes")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.name || document.activeElement.textContent"
            )
        )
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or page.evaluate("document.activeElement === document.body")
    assert reached >= {
        *(
            "chat-tab",
            "conversations",
            "new",
            "delete",
            "export",
            "import",
            "show-settings",
            "messages",
            "prompt",
            "send",
        ),
        *("mode", "system", "temperature", "repetition_penalty", "logprobs", "tools"),
        *("Edit", "Retry", "Regenerate", "Copy"),
    }
    page.get_by_role("tab", name="Chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Server")).to_be_focused()
    expect(page.get_by_role("tabpanel", name="Server")).to_be_visible()
    expect(page.get_by_role("tabpanel", name="Chat")).to_be_hidden()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("tabpanel", name="Chat")).to_be_visible()


def test_screen_readers_are_told(page: Any) -> None:
    answering(page, sse({"content": "It is **so**."}))
    say(page, "Is it so?")
    expect(page.locator("#spoken")).to_have_text("Answer: It is so.")
    for role, name in (
        *(("banner", ""), ("main", ""), ("region", "Conversation"), ("log", "Messages"), ("form", "Settings")),
        *(("tablist", "Views"), ("tabpanel", "Chat"), ("article", "You"), ("article", "Model")),
    ):
        expect(page.get_by_role(role, name=name or None, exact=True)).to_have_count(1)
    expect(answers(page)).to_have_attribute("aria-busy", "false")
    nameless = page.evaluate("""[...document.querySelectorAll("button, input, select, textarea")]
        .filter(one => !(one.textContent.trim() || one.ariaLabel || one.labels?.length) && one.type !== "file")
        .map(one => one.outerHTML)""")
    assert nameless == []


CONTRAST = """names => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const light = colour => {
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(one => one / 255)
            .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const probe = document.body.appendChild(document.createElement("p"));
    const of = name => { probe.style.color = `var(--${name})`; return light(getComputedStyle(probe).color); };
    return names.map(([text, ground]) => {
        const [low, high] = [of(text), of(ground)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\\\d+/)[0]".replace("\\\\", "\\"))
    assert (int(red) > 128) == (scheme == "light")
    texts = [
        (text, ground) for text in ("text", "quiet", "accent", "second", "bad", "good") for ground in ("page", "raised")
    ]
    ratios = page.evaluate(CONTRAST, [*texts, ("on-accent", "accent")])
    assert min(ratios) >= 4.5, "what WCAG asks of text"


@pytest.mark.parametrize("width", [320, 390, 800, 1600])
def test_it_fits_any_width(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    answering(
        page, sse({"content": "```\n" + "a" * 500 + "\n```\n" + "b" * 500 + "\n\n|" + "c|" * 80 + "\n|" + "-|" * 80})
    )
    opened(page)
    say(page, "word" * 200)
    expect(answers(page)).to_contain_text("bbb")
    for tab in ("Server", "Chat"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.documentElement.scrollHeight") <= 700
    expect(page.get_by_label("Message", exact=True)).to_be_in_viewport()
    if width < 900:
        expect(page.get_by_role("form", name="Settings")).to_be_hidden()
        page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Temperature")).to_be_visible()
