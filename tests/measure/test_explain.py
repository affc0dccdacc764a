"""The page of an answer: complete, escaped, self-contained."""

from __future__ import annotations

import html
import html.parser
import re

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.stats import Record, Stats
from pyfly_cpp.measure.generator import Generated
from pyfly_cpp.measure.token_page import make_page, render

PIECES = {
    0: b"Hi",
    1: b" <b>&",
    2: b"\n",
    3: "é".encode()[:1],
    4: "é".encode()[1:],
    5: b"<|im_end|>",
    6: b"</script><script>",
}


def record(token, origin="matched", choice=None, rejected=(), round=0, reason="match"):
    return Record(
        1, token, origin, token if choice is None else choice, 1, reason, round, 0.5, float("inf"), -0.1, rejected
    )


def page(records, prompt="A <script>alert(1)</script> prompt", setting="margin:0.3"):
    generated = Generated("", (), "eog", 0.1, 5, 0.5, Stats(rounds=2, committed=5, drafted=8), tuple(records))
    return make_page(
        generated, lambda tokens: b"".join(PIECES[t] for t in tokens), lambda t: t == 5, prompt,
        Decoding.parse(setting), "/models/<i>.gguf", "a draft",
    )  # fmt: skip


RECORDS = [
    record(0),
    record(1, "loose", choice=6, reason="loose"),
    record(2, "target", rejected=(6, 2), round=1, reason="gate"),
    record(3, round=1),
    record(4, round=1),
    record(5, "target", round=1, reason="bonus"),
]


class Parser(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.open, self.links, self.deleted, self.tokens = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "br", "!doctype"):
            self.open.append(tag)
        attributes = dict(attributes)
        self.links += [attributes[name] for name in ("src", "href") if name in attributes]
        if "token" in (attributes.get("class") or "").split():
            self.tokens.append(attributes["class"].split()[1])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "del":
            self.deleted.append(data)


def test_the_page():
    text = render(page(RECORDS))
    parser = Parser()
    parser.feed(text)
    assert parser.open == [] and parser.links == [] and "script" not in parser.tags and "b" in parser.tags
    assert parser.tokens == ["matched", "loose", "target", "matched", "matched", "target"]
    assert parser.deleted == ["struck", "</script><script>", "↵"]
    assert html.escape("A <script>alert(1)</script> prompt") in text and "&lt;i&gt;.gguf" in text
    assert "default-src 'none'" in text and "url(" not in text and "@import" not in text
    assert "Lossy" in text and "Lossless" in render(page(RECORDS[:1], setting="exact"))


def test_the_page_tells_how_much_is_drafted():
    told = {setting: render(page(RECORDS[:1], setting=setting)) for setting in ("exact", "exact adaptive", "plain")}
    assert [setting for setting, text in told.items() if "full length" in text] == ["exact"]
    assert [setting for setting, text in told.items() if "as in chat" in text] == ["exact adaptive"]


def test_bytes_of_one_character_are_shown_when_it_is_whole():
    tokens = page(RECORDS)["tokens"]
    assert [token["text"] for token in tokens] == ["Hi", " <b>&", "\n", None, "é", "<|im_end|>"]
    assert tokens[3]["shown"] == "C3 (bytes)" and tokens[5]["special"] and tokens[1]["choice"] == "</script><script>"
    assert [token["begins_step"] for token in tokens] == [False, False, True, False, False, False]
    assert tokens[0]["margin"] == "–" and tokens[0]["probability"] == "90.5%"


def test_a_real_answer(generator):
    llm = generator.llm
    llm.trace = True
    try:
        prompt = generator.render([{"role": "user", "content": "How many apples?"}])
        setting = Decoding.parse("margin:0.5 reconverge")
        generated = generator.generate(prompt, setting, 60)
    finally:
        llm.trace = False
    made = make_page(generated, lambda t: llm.detokenize(t, special=True), lambda t: False, "How?", setting, "m.gguf")
    counts = sum(made[f"n_{origin}"] for origin in ("matched", "loose", "target"))
    assert counts == len(generated.records) == len(made["tokens"])
    answer = "".join(token["text"] or "" for token in made["tokens"])
    assert answer.startswith(generated.text)
    text = render(made)
    shown = re.sub(
        r"<del.*?</del>|<span class=\"tip\">.*?</span></span>", "", text.split('class="answer">')[1], flags=re.S
    )
    shown = html.unescape(re.sub(r"<[^>]+>", "", shown.split("</div>")[0]))
    assert shown == answer


def test_an_empty_answer():
    assert "Ended by" in render(page([]))


def test_a_token_without_a_draft():
    alone, behind = record(0, "target", reason="bonus"), record(2, "target", round=1, reason="bonus")
    shown = [token["what"] for token in page([alone, record(1, round=1), behind])["tokens"]]
    assert "nothing was drafted" in shown[0] and "accepted whole" in shown[2]


def test_rejected_drafts_add_up():
    shown = page([record(2, "target", rejected=(6, 2, 1), reason="gate"), record(0, "target", rejected=(1,))])
    assert shown["n_rejected"] == 4 and ("drafts behind a rejected one", "2") in shown["numbers"]
