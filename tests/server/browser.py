"""The page at / in a browser, as tests use it; playwright's ``page`` and what it finds there."""

import json
from typing import Any


def is_fault(message: Any) -> bool:
    """Statuses that a test wants are no faults, and the browser logs them."""
    return message.type in ("error", "warning") and "Failed to load resource" not in message.text


def is_own(url: str, url_of_server: str) -> bool:
    return url.startswith((f"{url_of_server}/", "blob:"))


def opened(page: Any) -> None:
    page.goto("/")
    page.locator("#state.good").wait_for()


def say(page: Any, text: str, **settings: str) -> None:
    """Write a message and send it, with these settings by their labels."""
    for label, value in settings.items():
        page.get_by_label(label.replace("_", " ").capitalize(), exact=True).fill(value)
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def answers(page: Any) -> Any:
    return page.get_by_role("article", name="Model", exact=True)


def text_of(answer: Any) -> str:
    return answer.locator("> .content").evaluate("one => one.textContent")


def ended(page: Any) -> None:
    page.get_by_role("button", name="Send", exact=True).wait_for()


def sse(*deltas: Any, end: str = "stop") -> str:
    """A chat's stream of these deltas."""
    choices: list[Any] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": end})
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    events = [json.dumps({"choices": [choice], "usage": usage}) for choice in choices]
    return "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))


def answering(page: Any, *bodies: str, path: str = "v1/chat/completions", status: int = 200) -> list[Any]:
    """Requests to the path get these streams, one after the other. Returns what they asked, as it comes."""
    asked: list[Any] = []

    def answer(route: Any) -> None:
        asked.append(json.loads(route.request.post_data))
        kind = "text/event-stream" if status == 200 else "application/json"
        route.fulfill(status=status, content_type=kind, body=bodies[min(len(asked), len(bodies)) - 1])

    page.route(f"**/{path}", answer)
    return asked
