"""The page at `/` in a real browser (`pytest -m page`: needs playwright and a Chromium; $PYFLY_CHROMIUM is its path).

With $PYFLY_SCREENSHOTS, pictures of it are left in that folder.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from serving import running

from pyfly_cpp.serve.app import PAGE

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
        page.set_default_timeout(30_000)
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
        page.screenshot(path=Path(os.environ["PYFLY_SCREENSHOTS"]) / f"{name}.png")


def ask(page, text, **settings):
    if settings:
        page.evaluate("document.querySelector('details').open = true")
    for name, value in settings.items():
        page.locator(f"#{name}").fill(str(value))
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def until(page, condition):
    """Waits for a condition in JavaScript (playwright's own way of waiting is eval(), which the page forbids)."""
    deadline = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


def wait_idle(page):
    until(page, "running.size === 0 && !document.getElementById('send').hidden")


def set_rule(page, step):
    page.locator("#rule").fill(str(step))


def texts(page):
    return page.locator(".answer .text").evaluate_all(
        "all => all.map(one => [...one.querySelectorAll('.token')].map(t => t.textContent).join(''))"
    )


def test_a_chat(open_page, server):
    page = open_page()
    until(page, "document.getElementById('model').textContent.startsWith('tiny')")
    assert page.locator("#rule-name").inner_text() == "exact"
    ask(page, "Natalia sold clips to 48 of her friends.", most=48)
    wait_idle(page)
    messages = [{"role": "user", "content": "Natalia sold clips to 48 of her friends."}]
    body = {"messages": messages, "max_tokens": 48, "temperature": 0}
    expected = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    assert texts(page) == [expected]
    assert page.locator(".token.matched").count() > 0
    assert page.locator(".token.loose").count() == 0
    numbers = page.locator(".numbers").inner_text()
    assert "a round" in numbers and "a second" in numbers and "0 loose" in numbers
    shot(page, "exact")
    ask(page, "And then?", most=16)  # goes on with the conversation
    wait_idle(page)
    messages += [{"role": "assistant", "content": expected}, {"role": "user", "content": "And then?"}]
    body = {"messages": messages, "max_tokens": 16, "temperature": 0}
    expected = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    assert texts(page)[1] == expected
    page.locator("#new").click()
    assert page.locator(".answer").count() == 0


def test_loose_beside_exact(open_page):
    page = open_page()
    set_rule(page, 10)
    assert page.locator("#rule-name").inner_text() == "margin:2"
    assert "Lossy" in page.locator("#rule-note").inner_text()
    page.locator("#both").check()
    ask(page, "Once upon a time", most=64)
    wait_idle(page)
    exact, loose = page.locator(".answer").all()
    assert exact.locator(".token.loose").count() == 0 < loose.locator(".token.loose").count()
    assert page.locator(".parts").count() == 2
    shot(page, "side-by-side")
    assert page.locator(".answer.chosen").get_attribute("aria-label") == "Answer, exact"
    loose.locator("button").click()
    assert page.locator(".answer.chosen").get_attribute("aria-label") == "Answer, margin:2"
    page.locator("#coloured").uncheck()
    assert page.locator(".answers.coloured").count() == 0


def test_what_a_token_says(open_page):
    page = open_page()
    set_rule(page, 10)
    ask(page, "Once upon a time", most=64)
    wait_idle(page)
    page.locator(".token.loose").first.hover()
    tip = page.locator("#tip")
    assert "loosely accepted" in tip.inner_text() and "the target's choice" in tip.inner_text()
    assert "margin" in tip.inner_text() and "entropy" in tip.inner_text()
    shot(page, "token")
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


def test_stop(open_page, server):
    # Clicked within the page, and more than once if need be: on a fast machine an answer may be over before.
    for _ in range(10):
        page = open_page()
        page.evaluate("""() => new MutationObserver((_, observer) => {
            if (document.querySelectorAll(".token").length > 3) {
                observer.disconnect();
                document.querySelector("#stop").click();
            }
        }).observe(document.body, {childList: true, subtree: true})""")
        ask(page, "Once upon a time", most=400)
        wait_idle(page)
        if "stopped" in page.locator(".numbers").inner_text():
            break
    assert "stopped" in page.locator(".numbers").inner_text()
    assert page.locator(".token").count() < 400
    server.until_idle()


def test_errors_are_shown(open_page):
    page = open_page()
    ask(page, "word " * 2000, most=8)
    wait_idle(page)
    assert "context" in page.locator(".failure").inner_text()
    assert all("400" in message for message in page.expected_errors)  # the browser's own line
    page.expected_errors.clear()


def test_a_key(open_page, batch):
    with running(batch, keys=("secret",)) as locked:
        page = open_page(locked.url)
        until(page, "!document.getElementById('locked').hidden")
        page.locator("#key").fill("secret")
        page.locator("#unlock").click()
        until(page, "document.getElementById('locked').hidden")
        assert all("401" in message for message in page.expected_errors)
        page.expected_errors.clear()
        ask(page, "Once", most=8)
        wait_idle(page)
        assert page.locator(".token").count() > 0


def test_a_phone_in_the_dark(open_page):
    page = open_page(viewport={"width": 375, "height": 667}, color_scheme="dark", has_touch=True)
    set_rule(page, 10)
    page.locator("#both").check()
    ask(page, "Once upon a time", most=48)
    wait_idle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    left, right = (one.bounding_box() for one in page.locator(".answer").all())
    assert left["x"] == right["x"] and left["y"] < right["y"]  # one below the other
    page.locator(".token.loose").first.scroll_into_view_if_needed()
    page.locator(".token.loose").first.tap()
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 375
    shot(page, "phone-dark")


def test_what_a_model_writes_is_text(open_page):
    page = open_page()
    ask(page, "<img src=x onerror=alert(1)><script>alert(2)</script>", most=8)
    wait_idle(page)
    assert page.locator(".user img, .user script").count() == 0
    text = PAGE.read_text(encoding="utf-8")
    assert "innerHTML" not in text and "http://" not in text and "https://" not in text
