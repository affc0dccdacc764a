"""The page at `/` in a real browser (`pytest -m page`: needs playwright and a Chromium; $PYFLY_CHROMIUM is its path).

With $PYFLY_SCREENSHOTS, pictures of it are left in that folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from serving import no_end, running

from pyfly_cpp.serve.pages import PAGE

pytestmark = pytest.mark.page


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    names = (os.environ.get("PYFLY_CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("there is no Chromium; set PYFLY_CHROMIUM to its path")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, server):
    """Opens the page; afterwards nothing was asked of another machine and the console is empty."""
    contexts, wrong, asked = [], [], set()

    def open_page(url=server.url, **options):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.add(request.url.partition("//")[2].partition("/")[0]))
        page.goto(url)
        page.expected_errors = wrong
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong
    assert {name.partition(":")[0] for name in asked if name} <= {"127.0.0.1"}


def shot(page, name):
    if os.environ.get("PYFLY_SCREENSHOTS"):
        page.evaluate("document.getElementById('settings').open = false")
        page.screenshot(path=Path(os.environ["PYFLY_SCREENSHOTS"]) / f"{name}.png")


def ask(page, text, waits=True, **settings):
    for name, value in settings.items():
        page.evaluate("document.getElementById('settings').open = true")
        page.locator(f"#{name}").fill(str(value))
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    if waits:
        wait_idle(page)


def until(page, condition):
    """Waits for a condition in JavaScript (playwright's own way of waiting is eval(), which the page forbids)."""
    deadline = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


def wait_idle(page):
    until(page, "!document.body.classList.contains('busy')")


def answer_with(page, *chunks, finish="stop", status=200, records=False):
    """Has the page read these deltas instead of the server's; returns the requests' bodies. `records`: each delta is
    one token of the target's."""
    bodies = []

    def fulfill(route):
        bodies.append(json.loads(route.request.post_data))
        if status != 200:
            error = json.dumps({"error": {"message": chunks[0]}})
            route.fulfill(status=status, content_type="application/json", body=error)
            return
        deltas = [{"content": chunk} if isinstance(chunk, str) else chunk for chunk in chunks]
        events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        for event, chunk in zip(events, chunks if records else ()):
            token = {"text": chunk, "origin": "target", "round": 0}
            event["choices"][0]["pyfly"] = {"tokens": [token]}
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.unroute_all()
    page.route("**/v1/chat/completions", fulfill)
    return bodies


def set_gate(page, step):
    page.locator("#gate").fill(str(step))


def show_drafts(page):
    page.locator("#drafts").click()


def tokens(page):
    """The text of each answer by its tokens."""
    return page.locator(".answer .tokens").evaluate_all("all => all.map(one => one.textContent)")


def copied(page, selector):
    """What the keyboard copies of an element."""
    page.evaluate("s => getSelection().selectAllChildren(document.querySelector(s))", selector)
    page.keyboard.press("Control+c")
    return page.evaluate("navigator.clipboard.readText()")


def expected_failures(page, status):
    """The browser's own lines about responses."""
    assert page.expected_errors and all(str(status) in message for message in page.expected_errors)
    page.expected_errors.clear()


CLIPBOARD = {"permissions": ["clipboard-read", "clipboard-write"]}
CODE = """Use a **loop**:

```python
def add(a, b):
    return a + b  # <b>&
```

| a | b |
|---|---|
| 1 | 2 |

- [x] done
"""


# ---- Answers ---------------------------------------------------------------------------------------------------------


def test_a_chat(open_page, server):
    page = open_page()
    until(page, "document.getElementById('model').textContent.startsWith('tiny')")
    assert page.locator("#gate-name").inner_text() == "exact"
    ask(page, "Natalia sold clips to 48 of her friends.", max_tokens=48)
    messages = [{"role": "user", "content": "Natalia sold clips to 48 of her friends."}]
    body = {"messages": messages, "max_tokens": 48, "temperature": 0}
    expected = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    assert page.locator(".token").count() == 0  # drafts are not shown at first
    numbers = page.locator(".numbers").inner_text()
    assert " tokens" in numbers and "a step" in numbers and "0 loose" in numbers
    show_drafts(page)
    assert tokens(page) == [expected]
    assert page.locator(".token.matched").count() > 0 and page.locator(".token.loose").count() == 0
    shot(page, "drafts")
    ask(page, "And then?", max_tokens=16)  # continues the conversation
    messages += [{"role": "assistant", "content": expected}, {"role": "user", "content": "And then?"}]
    body = {"messages": messages, "max_tokens": 16, "temperature": 0}
    assert tokens(page)[1] == server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]


def test_a_prompt_that_is_read(open_page, narrow_batch):
    """A line tells how far it is, until the first token."""
    with running(narrow_batch) as slow:
        page = open_page(slow.url)
        page.evaluate("""() => {
            window.lines = [];
            new MutationObserver(() => {
                const line = document.querySelector(".numbers")?.textContent;
                if (line && line !== window.lines.at(-1)) window.lines.push(line);
                const found = /^reading.*?([1-9][\\d,]*) of/.exec(line);
                if (found && !window.held) document.body.dataset.held = window.held = line;
            }).observe(document.body, {childList: true, subtree: true});
        }""")
        ask(page, "word " * 4000, max_tokens=4, waits=False)
        until(page, "document.body.dataset.held")
        shot(page, "reading")
        wait_idle(page)
        lines = page.evaluate("window.lines")
    assert "waiting" in lines[0] and "4 tokens" in lines[-1]
    found = [re.fullmatch(r"reading the prompt: ([\d,]+) of ([\d,]+) tokens", line) for line in lines[1:-1]]
    read = [[int(number.replace(",", "")) for number in match.groups()] for match in found if match]
    assert len(read) > 2 and read == sorted(read) and len({total for _, total in read}) == 1
    assert read[0][1] > 4000 and all(n <= total for n, total in read)


def test_markdown(open_page):
    page = open_page(**CLIPBOARD)
    answer_with(page, CODE[:40], CODE[40:])
    ask(page, "How?")
    text = page.locator(".text")
    assert text.locator("strong").inner_text() == "loop"
    assert text.locator("pre code .hljs-keyword").first.inner_text() == "def"
    assert text.locator("td").all_inner_texts() == ["1", "2"] and text.locator("input[type=checkbox]").count() == 1
    shot(page, "code")
    page.get_by_label("Copy code").click()
    assert page.evaluate("navigator.clipboard.readText()") == "def add(a, b):\n    return a + b  # <b>&\n"
    page.get_by_label("Copy the answer").click()
    assert page.evaluate("navigator.clipboard.readText()") == CODE


def test_copies_are_confirmed(open_page):
    """For a moment, also where the browser gives the page no clipboard."""
    for options in (CLIPBOARD, {}):
        page = open_page(**options)
        answer_with(page, CODE)
        ask(page, "How?")
        for label in ("Copy the answer", "Copy code"):
            page.get_by_label(label).click()
            shown = f"document.querySelector('[aria-label=\"{label}\"]').textContent"
            until(page, f"{shown} === 'Copied'")
            assert page.locator("#told").text_content() == "Copied"
            until(page, f"{shown} === 'Copy'")
        assert page.locator("#told").text_content() == ""


def test_text_that_stands_stays(open_page):
    """An answer that grows is not drawn anew: selections hold."""
    page = open_page()
    page.evaluate("""async () => {
        const { show } = await import("/page/markdown.js");
        const place = document.getElementById("empty");
        show(place, "One.\\n\\n```c\\nint a;");
        const first = place.firstChild;
        show(place, "One.\\n\\n```c\\nint a;\\n```\\n\\nTwo.");
        window.stays = first === place.firstChild && place.children.length === 3;
    }""")
    assert page.evaluate("window.stays")


def test_what_a_model_writes_is_text(open_page):
    page = open_page()
    hostile = (
        "<img src=x onerror=alert(1)><script>alert(2)</script>\n\n![pixel](http://elsewhere.example/x.png) "
        "[link](javascript:alert(3)) <b onclick=alert(4)>b</b> <style>*{display:none}</style>\n\n"
        "<iframe src=//e.example>"
    )
    answer_with(page, hostile)
    ask(page, hostile)
    for place in (".user", ".text"):
        box = page.locator(place)
        assert box.locator("img, script, style, iframe, b, [onclick], [onerror], a[href^=javascript]").count() == 0
        assert "onerror=alert(1)" in box.inner_text()
    assert page.locator(".text a").first.get_attribute("rel") == "noopener noreferrer"


def test_thinking_is_folded(open_page):
    page = open_page()
    for chunks in (
        [{"reasoning_content": "It is "}, {"reasoning_content": "two."}, "The answer is 2."],
        ["<think>\nIt is ", "two.\n</think>\n\nThe answer is 2."],
        ["It is two.</think>The answer is 2."],
    ):
        page.locator("#new").click()
        bodies = answer_with(page, *chunks)
        ask(page, "1 + 1?")
        assert page.locator(".text").inner_text() == "The answer is 2."
        assert not page.locator(".thinking-text").is_visible()
        page.locator(".thinking summary").click()
        assert page.locator(".thinking-text").inner_text() == "It is two."
        ask(page, "Sure?")
        assert [message["content"] for message in bodies[-1]["messages"]] == ["1 + 1?", "The answer is 2.", "Sure?"]


def test_what_is_heard(open_page):
    """A screen reader hears the answer, by paragraphs, and no statistics."""
    page = open_page()
    answer_with(page, "One `x`.\n\nTwo", ".")
    ask(page, "Say it")
    assert page.locator("#spoken").get_attribute("role") == "log"
    assert " ".join(page.locator("#spoken p").all_text_contents()).split() == ["One", "x.", "Two."]
    assert page.locator("[aria-live], [role=status], [role=log], [role=alert]").filter(has_text="tokens").count() == 0


# ---- Drafts ----------------------------------------------------------------------------------------------------------


def test_loose_beside_exact(open_page):
    page = open_page()
    set_gate(page, 10)
    assert page.locator("#gate-name").inner_text() == "margin:2"
    assert re.search("Lossy: .* 14% as likely as .* most probable token", page.locator("#gate-note").inner_text())
    page.locator("#both").check()
    show_drafts(page)
    ask(page, "Once upon a time", max_tokens=64)
    exact, loose = page.locator(".answer").all()
    assert exact.locator(".token.loose").count() == 0 < loose.locator(".token.loose").count()
    assert page.locator(".parts").count() == 2
    shot(page, "two-gates")
    assert page.locator(".answer.chosen").get_attribute("aria-label") == "Answer, exact"
    loose.get_by_text("Use this one").click()
    assert page.locator(".answer.chosen").get_attribute("aria-label") == "Answer, margin:2"
    page.reload()  # the choice is kept, and both answers
    page.locator("#chat-list .title").click()
    assert page.locator(".answer.chosen").get_attribute("aria-label") == "Answer, margin:2"


def test_rejected_drafts_are_not_copied(open_page, server):
    page = open_page(**CLIPBOARD)
    show_drafts(page)
    ask(page, "Natalia sold clips to 48 of her friends.", max_tokens=48)
    assert page.locator(".tokens del").count() > 0
    expected = tokens(page)[0]
    assert copied(page, ".tokens").strip() == expected.strip()
    kinds = page.evaluate("navigator.clipboard.read().then(items => items.flatMap(item => item.types))")
    assert kinds == ["text/plain"]  # no colours
    page.get_by_label("Copy the answer").click()
    assert page.evaluate("navigator.clipboard.readText()") == expected


def test_code_keeps_its_font_among_drafts(open_page):
    page = open_page()
    answer_with(page, *re.findall(r"\S+|\s", CODE), records=True)
    show_drafts(page)
    ask(page, "How?")
    assert tokens(page) == [CODE]
    shown = page.locator(".token").evaluate_all(
        "all => all.map(one => [one.textContent, getComputedStyle(one).fontFamily.includes('monospace')])"
    )
    assert "".join(text for text, is_code in shown if is_code) == CODE[CODE.index("```") : CODE.rindex("```") + 3]
    shot(page, "drafts-of-code")
    for text, code in {
        "a `b` and ``c ` d``, no ` e": ["`b`", "``c ` d``"],
        "``` `x` ```": ["``` `x` ```"],
        "~~~c\n`x`\n```\n~~~\n`y`": ["~~~c\n`x`\n```\n~~~", "`y`"],
        "1. ```\n   a\n   ```\n> ````\n> ```\n> b": ["1. ```\n   a\n   ```", "> ````\n> ```\n> b"],
        "none": [],
    }.items():
        found = page.evaluate("async text => (await import('/page/markdown.js')).codeOf(text)", text)
        assert [text[begin:end] for begin, end in found] == code


def test_what_a_token_says(open_page):
    page = open_page()
    set_gate(page, 10)
    show_drafts(page)
    ask(page, "Once upon a time", max_tokens=64)
    page.locator(".token.loose").first.hover()
    tip = page.locator("#tip")
    assert "loosely accepted" in tip.inner_text() and "the target's choice" in tip.inner_text()
    assert "margin" in tip.inner_text() and "entropy" in tip.inner_text()
    page.mouse.move(0, 0)
    assert tip.is_hidden()
    # With the keyboard: one stop for the answer, arrows inside it.
    page.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("[...document.querySelectorAll('.token')].indexOf(document.activeElement)") == 1
    assert tip.is_visible()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    assert page.locator(".token[tabindex='0']").count() == 1


# ---- Stop, continue, regenerate, edit --------------------------------------------------------------------------------


def test_stop(open_page, server):
    # Clicked within the page, and more than once if need be: on a fast machine an answer may be over before.
    for _ in range(10):
        page = open_page()
        show_drafts(page)
        page.evaluate("""() => new MutationObserver((_, observer) => {
            if (document.querySelectorAll(".token").length > 3) {
                observer.disconnect();
                document.querySelector("#stop").click();
            }
        }).observe(document.body, {childList: true, subtree: true})""")
        ask(page, "Once upon a time", max_tokens=400)
        if "stopped" in page.locator(".numbers").inner_text():
            break
    assert "stopped" in page.locator(".numbers").inner_text()
    assert 0 < page.locator(".token").count() < 400
    assert page.get_by_label("Continue the answer").is_visible()
    server.until_idle()


def test_continue(open_page):
    page = open_page()
    answer_with(page, "One, two,", finish="length")
    ask(page, "Count")
    assert "limit" in page.locator(".numbers").inner_text()
    bodies = answer_with(page, " three.")
    page.get_by_label("Continue the answer").click()
    wait_idle(page)
    assert page.locator(".text").inner_text() == "One, two, three."
    assert bodies[0]["messages"][-1] == {"role": "assistant", "content": "One, two,"}
    assert bodies[0]["continue_final_message"] is True
    assert page.get_by_label("Continue the answer").is_hidden()
    assert page.locator(".answer").count() == 1


def test_continue_with_the_server(open_page, server):
    page = open_page()
    ask(page, "Tom has 3 apples and 4 pears. How many fruits?", max_tokens=12)
    messages = [{"role": "user", "content": "Tom has 3 apples and 4 pears. How many fruits?"}]
    text = ""
    for _ in range(2):  # by the limit, twice
        page.get_by_label("Continue the answer").click()
        wait_idle(page)
    for _ in range(3):
        begun = [{"role": "assistant", "content": text}] if text else []
        answer = server.post("/v1/chat/completions", messages=messages + begun, max_tokens=12, temperature=0).json()
        text += answer["choices"][0]["message"]["content"]
    show_drafts(page)
    assert tokens(page) == [text]
    assert "12 tokens" in page.locator(".numbers").inner_text()


def test_continue_within_thoughts(open_page, batch):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: <think>\n"
    with running(batch, chat_template=template) as thinking:
        page = open_page(thinking.url)
        ask(page, "How many?", max_tokens=12)
        page.locator(".thinking summary").click()
        first = page.locator(".thinking-text").inner_text()
        page.get_by_label("Continue the answer").click()
        wait_idle(page)
        both = page.locator(".thinking-text").inner_text()
        assert both.startswith(first) and len(both) > len(first) > 0
        assert page.locator(".text").inner_text() == ""


def test_regenerate_and_edit(open_page):
    page = open_page()
    for question, answer in (("First?", "Eins."), ("Second?", "Zwei.")):
        answer_with(page, answer)
        ask(page, question)
    bodies = answer_with(page, "Two.")
    page.get_by_label("Regenerate the answer").last.click()
    wait_idle(page)
    assert page.locator(".text").all_inner_texts() == ["Eins.", "Two."]
    assert [message["content"] for message in bodies[0]["messages"]] == ["First?", "Eins.", "Second?"]
    assert page.locator("#chat-list li").count() == 1
    # A message with others behind it: these stay in the chat they are in.
    page.get_by_label("Edit this message").first.click()
    assert page.locator("#prompt").input_value() == "First?"
    answer_with(page, "One.")
    ask(page, "First, in English?")
    assert page.locator(".user").all_inner_texts() == ["First, in English?"]
    assert page.locator("#chat-list li").count() == 2
    page.locator("#chat-list .title").last.click()
    assert page.locator(".text").all_inner_texts() == ["Eins.", "Two."]


# ---- Failures --------------------------------------------------------------------------------------------------------


def test_a_message_that_fails_stays(open_page):
    page = open_page()
    long = "word " * 2000
    ask(page, long, max_tokens=8)
    assert re.match("The prompt .* context", page.locator("#alert").inner_text())
    assert page.locator("#prompt").input_value() == long.strip()
    assert page.locator(".turn").count() == page.locator("#chat-list li").count() == 0
    expected_failures(page, 400)
    shot(page, "error")
    # Nor is an answer lost that is asked for again, nor a message that is edited.
    answer_with(page, "Fine.")
    ask(page, "Rain?")
    assert page.locator("#alert").is_hidden()
    answer_with(page, "The server is full; try again later.", status=429)
    page.get_by_label("Regenerate the answer").click()
    wait_idle(page)
    assert page.locator(".text").inner_text() == "Fine." and "full" in page.locator("#alert").inner_text()
    page.get_by_label("Edit this message").click()
    ask(page, "Snow?")
    assert page.locator(".user").inner_text() == "Rain?" and page.locator("#prompt").input_value() == "Snow?"
    assert page.locator("#editing").is_visible()
    expected_failures(page, 429)


def test_an_answer_that_breaks_off_stays(open_page):
    page = open_page()
    answer_with(page, "Half an", {"content": " answer"})
    page.unroute_all()
    events = 'data: {"choices": [{"delta": {"content": "Half an"}}]}\n\ndata: {"error": {"message": "It ended."}}\n\n'
    page.route("**/v1/chat/completions", lambda r: r.fulfill(status=200, content_type="text/event-stream", body=events))
    ask(page, "Go")
    assert page.locator(".text").inner_text() == "Half an"
    assert page.get_by_label("Continue the answer").is_visible()
    # The failure is shown once, until the message box changes.
    assert page.get_by_text("It ended.").count() == 1 and page.locator("#alert").inner_text() == "It ended."
    page.locator("#prompt").press("a")
    assert page.locator("#alert").is_hidden() and "broken off" in page.locator(".numbers").inner_text()


def test_a_stream_that_ends_too_early_is_no_whole_answer(open_page):
    """As behind a proxy whose server was killed: nothing says that it is not the end."""
    page = open_page()
    events = 'data: {"choices": [{"delta": {"content": "Half an"}}]}\n\n'
    page.route("**/v1/chat/completions", lambda r: r.fulfill(status=200, content_type="text/event-stream", body=events))
    ask(page, "Go")
    assert page.locator("#alert").inner_text() == "The connection to the server was lost."
    assert page.get_by_label("Continue the answer").is_visible()


def test_an_answer_that_no_reader_of_markdown_takes(open_page):
    page = open_page()
    answer_with(page, ">" * 3000)
    ask(page, "Go")
    assert page.locator(".text").inner_text() == ">" * 3000
    page.reload()
    assert page.locator(".text").inner_text() == ">" * 3000 and page.locator("#model").inner_text().startswith("tiny")


def test_stop_while_the_page_connects(open_page):
    page = open_page()
    held, bodies = [], []
    page.route("**/v1/models", lambda route: held.append(route))
    page.route("**/v1/chat/completions", lambda route: bodies.append(route.request.post_data))
    with page.expect_request("**/v1/models"):
        page.reload(wait_until="commit")
    ask(page, "Go", waits=False)
    page.locator("#stop").click()
    held[0].continue_()
    wait_idle(page)
    assert not bodies and page.locator("#prompt").input_value() == "Go"


def test_an_edit_that_is_left_loses_nothing(open_page):
    """What it would have replaced stays, and the new message is in a chat beside it."""
    page = open_page()
    fill_chats(page, "About rain?", "About snow?")
    page.unroute_all()
    page.route("**/v1/chat/completions", lambda _: None)
    page.get_by_label("Edit this message").click()
    ask(page, "About fog?", waits=False)
    page.locator("#chat-list .title").last.click()
    wait_idle(page)
    assert sorted(page.locator("#chat-list .title").all_inner_texts()) == ["About fog?", "About rain?", "About snow?"]
    page.locator("#chat-list .title").get_by_text("About snow?").click()
    assert page.locator(".text em").inner_text() == "About snow?"


def test_a_server_that_fails_is_told_once(open_page):
    page = open_page()
    failure = {"error": {"message": "the model is gone."}}
    page.route("**/v1/**", lambda route: route.fulfill(status=500, json=failure))
    page.reload()
    until(page, "!document.getElementById('alert').hidden")
    ask(page, "Go")
    assert page.get_by_text("The model is gone.").count() == 1
    assert page.locator("#model").inner_text() == "not connected" and page.locator("#prompt").input_value() == "Go"
    page.locator("#prompt").press("a")
    assert page.locator("#alert").is_hidden()
    page.unroute_all()
    answer_with(page, "Yes.")
    ask(page, "Now?")
    assert page.locator("#model").inner_text().startswith("tiny") and page.locator("#alert").is_hidden()
    expected_failures(page, 500)


def test_settings_are_those_that_the_server_takes(open_page, server):
    page = open_page()
    until(page, "document.getElementById('temperature').max !== ''")
    most = page.locator("#max_tokens").get_attribute("max")
    assert int(most) == server.service.settings.limits.max_tokens
    bodies = answer_with(page, "Yes.")
    page.evaluate("document.getElementById('settings').open = true")
    page.locator("#top_p").fill("2")
    page.evaluate("document.getElementById('settings').open = false")
    ask(page, "Go?", waits=False)
    assert not bodies and page.locator("#prompt").input_value() == "Go?" and page.locator("#top_p").is_visible()
    ask(page, "Go?", top_p="0.9", system="Be brief.")
    assert bodies[0]["top_p"] == 0.9 and "temperature" not in bodies[0] and "max_tokens" not in bodies[0]
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    page.reload()
    assert page.locator("#top_p").input_value() == "0.9" and page.locator("#system").input_value() == "Be brief."


def test_an_answer_is_sampled_as_in_chat(open_page, batch):
    """Unless the reader sets something else; two answers to compare are drawn alike."""
    with running(batch, page_sampling={"temperature": 0.7, "top_k": 11}) as own:
        page = open_page(own.url)
        until(page, "document.getElementById('temperature').placeholder === '0.7'")
        bodies = answer_with(page, "Yes.")
        ask(page, "Go?")
        ask(page, "Go on?", temperature="0")
        page.locator("#temperature").fill("")
        set_gate(page, 10)
        page.locator("#both").check()
        ask(page, "Both?")
        assert [body["temperature"] for body in bodies] == [0.7, 0, 0.7, 0.7] and bodies[0]["top_k"] == 11
        assert "seed" not in bodies[0] and "max_tokens" not in bodies[0] and bodies[0]["stop_loops"] is True
        assert bodies[2]["seed"] == bodies[3]["seed"] >= 0 and bodies[2]["gate"] != bodies[3]["gate"]


def test_empty_settings_show_the_numbers_behind_them(open_page, batch):
    with running(batch, default_max_tokens=100, seed=5) as own:
        page = open_page(own.url)
        until(page, "document.getElementById('temperature').placeholder !== ''")
        names = ("temperature", "top_p", "seed", "max_tokens")
        assert [page.locator(f"#{name}").get_attribute("placeholder") for name in names] == ["0", "", "5", "100"]
    page = open_page()
    until(page, "document.getElementById('seed').placeholder === 'any'")
    assert page.locator("#max_tokens").get_attribute("placeholder") == "512"  # as the context allows


def test_an_answer_that_repeats_itself_is_stopped(open_page, server):
    """And can be continued."""
    page = open_page()
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=json.dumps(
        {**json.loads(route.request.post_data), "logit_bias": {"300": 100}}
    )))  # fmt: skip
    ask(page, "Once upon a time", max_tokens=300)
    assert "128 tokens" in page.locator(".numbers").inner_text() and "repeats" in page.locator(".numbers").inner_text()
    assert page.get_by_label("Continue the answer").is_visible()


def test_a_key(open_page, batch):
    with running(batch, keys=("secret",)) as locked:
        page = open_page(locked.url)
        until(page, "!document.getElementById('locked').hidden")
        ask(page, "Once", max_tokens=8)
        assert page.locator("#alert").inner_text() == "The server asks for an API key: enter it above."
        page.locator("#key").fill("\u201csecret\u201d")  # as a word processor quotes it
        page.locator("#unlock").click()
        until(page, "document.getElementById('alert').textContent.includes('characters')")
        page.locator("#key").fill("guess")
        page.locator("#key").press("Enter")
        until(page, "document.getElementById('alert').textContent.includes('wrong')")
        page.locator("#key").fill("secret")
        page.locator("#unlock").click()
        until(page, "document.getElementById('locked').hidden")
        assert page.locator("#alert").is_hidden()
        expected_failures(page, 401)
        ask(page, "Once", max_tokens=8)
        assert "8 tokens" in page.locator(".numbers").inner_text()


# ---- Chats -----------------------------------------------------------------------------------------------------------


def fill_chats(page, *questions):
    """A chat for each question, whose answer is the question in italics."""
    for question in questions:
        page.locator("#new").click()
        answer_with(page, f"*{question}*")
        ask(page, question)


def test_chats_are_kept(open_page):
    page = open_page()
    fill_chats(page, "About rain?", "About snow?")
    page.reload()
    titles = page.locator("#chat-list .title")
    assert titles.all_inner_texts() == ["About snow?", "About rain?"]
    titles.last.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "About rain?", "the focus stays"
    assert page.locator(".text em").inner_text() == "About rain?"
    page.once("dialog", lambda dialog: dialog.accept("Weather"))
    page.get_by_text("Rename").click()
    assert titles.all_inner_texts() == ["Weather", "About snow?"]
    with page.expect_download() as download:
        page.get_by_text("Export").click()
    assert download.value.suggested_filename == "Weather.md"
    written = download.value.path().read_text(encoding="utf-8")
    assert "About rain?" in written and "*About rain?*" in written
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_text("Delete").click()
    assert titles.count() == 2
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_text("Delete").click()
    assert titles.all_inner_texts() == ["About snow?"] and page.locator(".turn").count() == 0


def test_a_reload_comes_back_to_the_same_chat(open_page):
    page = open_page()
    fill_chats(page, "About rain?", "About snow?")
    page.locator("#chat-list .title").last.click()
    page.locator("#prompt").fill("And of")
    page.reload()
    assert page.locator(".user").all_inner_texts() == page.locator(".text em").all_inner_texts() == ["About rain?"]
    assert page.locator("#chat-list [aria-current]").inner_text() == "About rain?"
    assert page.locator("#prompt").input_value() == "And of"
    shot(page, "reload")
    # A message that has no answer yet returns to the box, also one that replaces an earlier one.
    page.unroute_all()
    page.route("**/v1/chat/completions", lambda _: None)
    for before, message in (("", "And of hail?"), ("About rain?", "About fog?")):
        if before:
            page.get_by_label("Edit this message").click()
            assert page.locator("#prompt").input_value() == before
        ask(page, message, waits=False)
        until(page, "document.body.classList.contains('busy')")
        page.reload()
        assert page.locator(".user").all_inner_texts() == ["About rain?"]
        assert page.locator("#prompt").input_value() == message
        assert page.locator("#editing").is_visible() == bool(before)
    page.locator("#new").click()
    page.reload()
    assert page.locator(".turn").count() == 0 and page.locator("#prompt").input_value() == ""


def test_a_reload_keeps_what_was_written(open_page, narrow_batch):
    with running(narrow_batch) as slow:
        page = open_page(slow.url)
        page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=json.dumps(
            {**json.loads(route.request.post_data), "logit_bias": no_end(narrow_batch)}
        )))  # fmt: skip
        page.evaluate("""() => new MutationObserver((_, observer) => {
            if (document.querySelector(".text")?.textContent) {
                observer.disconnect();
                location.reload();
            }
        }).observe(document.body, {childList: true, subtree: true})""")
        with page.expect_navigation():
            ask(page, "Once upon a time", waits=False, max_tokens=4096, temperature=2)
        assert page.locator(".user").inner_text() == "Once upon a time" and page.locator(".text").inner_text()
        # Chromium may end the request before the page hears that it is left.
        assert page.locator(".numbers").inner_text() in ("stopped", "broken off")
        assert page.get_by_label("Continue the answer").is_visible() and page.locator("#prompt").input_value() == ""
        slow.until_idle()


def test_a_full_storage_is_told(open_page):
    page = open_page()
    page.evaluate("for (let n = 2 ** 22; n > 0; n >>= 1) try { localStorage[n] = 'x'.repeat(n); } catch {}")
    answer_with(page, "An answer.")
    ask(page, "A question")
    assert "storage" in page.locator("#alert").inner_text() and page.locator(".text").inner_text() == "An answer."


# ---- Looks -----------------------------------------------------------------------------------------------------------


def test_the_word_is_gate(open_page):
    page = open_page()
    page.evaluate("document.getElementById('settings').open = true")
    words = page.locator("body").inner_text().lower()
    assert "gate" in words and "rule" not in words


def test_dark_and_light(open_page):
    page = open_page(color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.locator("#theme").click()
    dark = page.evaluate(paper)
    assert dark != light and page.locator("#theme").get_attribute("aria-pressed") == "true"
    page.reload()
    assert page.evaluate(paper) == dark
    page.locator("#theme").click()
    assert page.evaluate(paper) == light


def test_a_phone(open_page):
    page = open_page(viewport={"width": 360, "height": 640}, color_scheme="dark", has_touch=True)
    set_gate(page, 10)
    page.locator("#both").check()
    show_drafts(page)
    ask(page, "Once upon a time", max_tokens=48)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    left, right = (one.bounding_box() for one in page.locator(".answer").all())
    assert left["x"] == right["x"] and left["y"] < right["y"]  # one below the other
    page.locator(".token.loose").first.scroll_into_view_if_needed()
    page.locator(".token.loose").first.tap()
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360
    show_drafts(page)
    page.locator("#both").uncheck()
    page.locator("#show-chats").click()
    page.locator("#new").click()
    assert page.locator("#chats").is_hidden()
    page.evaluate("document.getElementById('settings').open = false")
    answer_with(page, CODE + "`" + "wide" * 40 + "`")
    ask(page, "Code, please")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#scroll").bounding_box()["height"] > 300  # most of the screen
    shot(page, "phone")


def test_the_page_is_its_own():
    """Nothing of other machines, and no HTML made of text but by the kept libraries."""
    for file in PAGE.glob("*.*"):
        text = file.read_text(encoding="utf-8")
        assert "innerHTML" not in text and "http://" not in text and "https://" not in text
    for library in (PAGE / "kept").glob("*.js"):
        assert library.with_suffix(".LICENSE.txt").exists()
