"""What is being written: `regions_of` against an oracle that reads whole texts, and gates that follow it through
rounds, rollbacks and texts that go on."""

from __future__ import annotations

import re
from contextlib import closing

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llama_cpp import LlamaGrammar
from one_text import Engine
from test_engine_properties import Oracle, windows

from pyfly_cpp import DraftModel, Entropy, Exact, FlyLlama, Margin, Window
from pyfly_cpp._native import Batch, CallbackDrafter, ScriptedTarget
from pyfly_cpp.decoding.gates import REGIONS, AllOf, AnyOf, Budget, Regions, Relaxed, parse_gate, regions_of, why_strict

THOUGHTS = [("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]")]
TOOLS = [("<tool_call>", "</tool_call>"), ("<function=", "</function>"), ("[TOOL_CALLS]", None)]
MARKERS = [marker for pair in THOUGHTS + TOOLS for marker in pair if marker]
NUMBER = re.compile(r"[0-9][=+\-*/%<>.,$()\[\] \t]*\Z")


def in_code(text):
    """Whether Markdown that ends here ends in code."""
    *lines, last = text.split("\n")
    fence = None
    for line in lines:
        if fence:
            closed = re.fullmatch(rf"[ \t\r]*({re.escape(fence[0])}+)[ \t\r]*", line)
            fence = None if closed and len(closed[1]) >= len(fence) else fence
        elif opened := re.match(r"[ \t\r]*(`{3,}(?=[^`]*$)|~{3,})", line):
            fence = opened[1]
    if fence or re.match(r"[ \t\r]*(`{3,}[^`]*$|~{3,})", last):
        return True
    span = None
    for run in re.findall(r"`+", last):
        if span is None:
            span = len(run)
        elif len(run) == span:
            span = None
    return span is not None


def oracle(text):
    """The region behind each prefix of a text, whose numbers are prose, and whether each character is numbers."""
    regions, numeric = [], []
    think = tool = None
    start = 0
    for i in range(len(text)):
        code = in_code(text[start:i]) and tool is None
        regions.append("structured" if tool else "think" if think else "code" if code else "prose")
        numeric.append(text[i] in "0123456789" or (text[i] in "=+-*/%<>" and NUMBER.search(text[:i]) is not None))
        before, code = text[: i + 1], tool is None and in_code(text[start : i + 1])
        if tool:
            if tool[1] and before.endswith(tool[1]):
                tool, start = None, i + 1
        elif think and before.endswith(think[1]):
            think, start = None, i + 1
        elif not code:
            for pair in TOOLS + ([] if think else THOUGHTS):
                if before.endswith(pair[0]):
                    start = i + 1
                    tool, think = (pair, think) if pair in TOOLS else (tool, pair)
    return regions, numeric


parts = st.sampled_from([
    *MARKERS, "`", "``", "```", "````", "~~~", "~~~~", "\n", "\n", " ", "  ", "\t", "python", "a", "Total", "5", "12",
    "=", "+", "-", " * ", "/", "%", "<", ">", ".", ", ", "(", ")", "é", "日", "<th", "ink", "</", "[", "{\"x\": 1}",
])  # fmt: skip
texts = st.lists(parts, max_size=40).map("".join)


@settings(max_examples=300)
@given(texts, st.data())
@example("a `b` c ``d`e`` ```f```g\n", None)
@example("```py\n<think>``\n~~~\n ```  \nx", None)
@example("~~~\n```\n~~~~\n```x`y", None)
@example("<think>```\n</think>`<tool_call>``` 1", None)
@example("5 <think>+ 3 = 8, x = 2 </tool_call>- 12) * ", None)
def test_however_a_text_is_cut(text, data):
    """Every piece has the region of its first byte; pieces cut characters, fences and markers."""
    raw = text.encode()
    cuts = list(range(1, len(raw))) if data is None else sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)])]
    regions, numeric = oracle(text)
    by_byte = [(region, n) for char, region, n in zip(text, regions, numeric) for _ in char.encode()]
    end = 0
    for piece, region in zip(pieces, regions_of(pieces)):
        if piece:
            expected, _ = by_byte[end]
            numbers = any(n for _, n in by_byte[end : end + len(piece)])
            assert region == ("numbers" if expected == "prose" and numbers else expected), (pieces, end)
        end += len(piece)


def test_control_tokens():
    """They end what is open, but for those that are markers, which count in code, too."""
    pieces = [
        "```py\n",
        "x = 1",
        "<|im_end|>",
        "a",
        "`b",
        "<think>",
        "`c",
        "```\n",
        "</think>",
        "d",
        "<tool_call>",
        "2",
    ]
    control = [2, 5, 8, 10]
    assert regions_of(pieces, control) == [
        "prose", "code", "code", "prose", "prose", "code", "think", "think", "think", "prose", "prose", "structured",
    ]  # fmt: skip
    assert regions_of(["5 +", " <think>", " 3", "</think>", "<|python_tag|>", "1", "<|eom|>", "+"], [4, 6]) == [
        "numbers", "numbers", "think", "think", "prose", "structured", "structured", "prose",
    ]  # fmt: skip
    assert regions_of(["```\n", "x", "", "y"], [2]) == ["prose", "code", "code", "prose"]
    assert regions_of([]) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("regions(poem=margin:0.3)", "regions has no 'poem', but prose, code, numbers, think, structured."),
        ("regions(codes=margin:0.3)", "Did you mean 'code'"),
        ("regions(prose=margin:0.3, prose=exact)", "regions names 'prose' twice; give it one gate"),
        ("regions()", r"needs a gate for at least one region, as in regions\(prose=margin:0.3\)"),
        ("regions(margin:0.3)", r"'margin:0.3' names no region; write regions\(prose=...\)"),
        ("regions(prose=margn:0.3)", "Did you mean 'margin'"),
        ("regions(prose=)", "unknown gate ''"),
        ("regions(prose=budget:2)", r"budget:2 only restricts.* as in prose=all\(margin:0.3,budget:2\)"),
        ("all(margin:0.3,regions(prose=exact)", "unknown gate"),
    ],
)
def test_what_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        parse_gate(text)


def test_what_cannot_be_made():
    with pytest.raises(ValueError, match="at least one region"):
        Regions()
    with pytest.raises(ValueError, match=r"the region code needs a gate such as Margin\(0.3\), not 'exact'"):
        Regions(code="exact")


def test_written_and_lossless():
    gate = parse_gate("all(regions(code=exact,prose=margin:0.3, think=any(relaxed,margin:1)),budget:2)")
    assert gate == AllOf(Regions(prose=Margin(0.3), think=AnyOf(Relaxed(), Margin(1.0))), Budget(2))
    assert str(gate) == "all(regions(prose=margin:0.3,think=any(relaxed:10:0.6,margin:1)),budget:2)"
    assert not gate.is_lossless and gate.in_region("code").is_lossless
    assert str(Regions(code=Exact())) == "regions(prose=exact)" and Regions(code=Exact()).is_lossless


def test_windows_by_region():
    margin, relaxed, entropy = Margin().window, Relaxed().window, Entropy().window
    gate = Regions(prose=Margin(), think=Relaxed(), numbers=Entropy())
    own = dict(zip(REGIONS, gate.windows()))
    assert (own["prose"], own["think"], own["numbers"]) == (margin, relaxed, entropy)
    assert set(gate.windows(Window(3))) == {Window(3)}
    assert set(Regions(prose=Margin()).windows()) == {margin}
    assert AllOf(gate, Budget()).windows()[REGIONS.index("numbers")] == entropy
    assert AnyOf(gate, Entropy()).windows()[REGIONS.index("think")] == entropy
    assert why_strict(Regions(numbers=Entropy()), Regions(numbers=Entropy()).window, 4)
    assert why_strict(gate, gate.window, 4) is None


# ---- In rounds -------------------------------------------------------------------------------------------------------

PIECES = [
    b"<|end|>",
    b"<think>",
    b"word",
    b" 5",
    b" +",
    b"``",
    b"`x",
    b"\n",
    b"</think>",
    b"\xe6\x97",
    b" (",
    b"<tool_call>",
]
N_VOCAB, EOG, PROTECTED = len(PIECES), 0, {1, 8, 11}
CONTROL = {EOG} | PROTECTED
PROMPT = [2, 0, 2]


class Script:
    """A model and a drafter that are functions of the last few tokens."""

    def __init__(self, seed, agreement):
        self.seed, self.agreement = seed, agreement

    def row(self, history):
        row = np.random.default_rng([self.seed, *(int(t) for t in history[-3:])]).normal(size=N_VOCAB)
        row[EOG] -= 9.0
        return row.astype(np.float32)

    def choice(self, history):
        return int(self.row(history).argmax())

    def draft(self, history, k):
        rng = np.random.default_rng([self.seed, 77, *(int(t) for t in history[-4:])])
        out, text = [], list(history)
        for _ in range(rng.integers(0, k + 1)):
            order = np.argsort(-self.row(text))
            token = order[0] if rng.random() < self.agreement else order[rng.integers(0, N_VOCAB)]
            out.append(int(token))
            text.append(int(token))
        return out


class Undecided(Script):
    """The model says a word where its drafter says a bracket, which it likes almost as much."""

    def __init__(self):
        super().__init__(0, 1.0)

    def row(self, history):
        return np.array([0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0.9, 0], dtype=np.float32)

    def draft(self, history, k):
        return [10] * k


def region_behind(history, *tokens):
    """Of what comes next, either of the tokens."""
    pieces = [PIECES[t] for t in history]
    control = [i for i, t in enumerate(history) if t in CONTROL]
    found = {regions_of([*pieces, PIECES[t]], control)[-1] for t in tokens}
    return "numbers" if "numbers" in found else found.pop()


class RegionOracle(Oracle):
    """Defers in some regions alone."""

    def __init__(self, *arguments, regions, **options):
        super().__init__(*arguments, **options)
        self.regions = regions

    def defers(self, text, token, choice, n_left):
        if {token, choice} & CONTROL or region_behind(text, token, choice) not in self.regions:
            return False
        return super().defers(text, token, choice, n_left)


def decode(script, gate, window, k, n, prompt=PROMPT, n_texts=1, trace=False, **request):
    """Committed tokens of each text, and their records."""
    with ScriptedTarget(script.row, N_VOCAB, n_sequences=n_texts, pieces=PIECES) as target:
        target.protect(PROTECTED, [EOG])
        with CallbackDrafter(lambda history: script.draft(history, k)) as drafter, Batch(target) as batch:
            batch.configure([(drafter, k)])
            own = [w.config() for w in gate.windows(window)]
            for slot in batch.slots:
                slot.begin([*prompt, 2 + slot.number], gate.nodes(), own, trace=trace, **request)
            out = [[] for _ in batch.slots]
            records = [[] for _ in batch.slots]
            while min(map(len, out)) < n:
                for progress in batch.step():
                    slot = batch.slots[progress.slot]
                    out[slot.number] += [token for _, token in slot.tokens()]
                    records[slot.number] += [slot.record(i) for i in range(progress.n_records)]
            counters = [slot.counters() for slot in batch.slots]
    return out, records, counters


scripts = st.builds(Script, st.integers(0, 2**31), st.sampled_from([0.2, 0.6, 0.9]))


@settings(max_examples=100)
@given(scripts, st.sets(st.sampled_from(REGIONS), min_size=1), windows, st.integers(0, 8))
def test_commits_what_the_oracle_commits(script, regions, window, k):
    n = 30
    gate = Regions(**{region: Margin(1.5) for region in regions})
    out, records, counters = decode(script, gate, window, k, n, trace=True)
    expected = RegionOracle(script, 1.5, window, k, 4096, regions=regions).run(n, [*PROMPT, 2])
    m = min(len(out[0]), len(expected))
    assert m >= min(n, len(expected)) and out[0][:m] == expected[:m]
    text = [*PROMPT, 2]
    committed, loose = dict.fromkeys(REGIONS, 0), dict.fromkeys(REGIONS, 0)
    for record in records[0]:
        region = region_behind(text, record.token, record.choice)
        if record.origin != 2 or not record.rejected:  # else a rejected draft counts, too
            assert REGIONS[record.region] == region
        committed[REGIONS[record.region]] += 1
        loose[REGIONS[record.region]] += record.origin == 1
        text.append(record.token)
    assert counters[0]["committed_in"] == tuple(committed.values())
    assert counters[0]["loose_in"] == tuple(loose.values())
    assert all(n == 0 for region, n in loose.items() if region not in regions)


@settings(max_examples=30)
@given(scripts, windows, st.integers(1, 8))
def test_several_texts_and_one_gate_everywhere(script, window, k):
    """Each text is followed on its own; a gate that is named for every region is that gate."""
    gate, n = Margin(1.0), 20
    everywhere = Regions(**dict.fromkeys(REGIONS, gate))
    assert everywhere.windows() == gate.windows()
    out, _, _ = decode(script, everywhere, window, k, n, n_texts=3)
    plain, _, _ = decode(script, gate, window, k, n, n_texts=3)
    assert out == plain
    some = Regions(prose=gate, think=gate)
    together, _, _ = decode(script, some, window, k, n, n_texts=3)
    for i in range(3):
        alone = RegionOracle(script, 1.0, window, k, 4096, regions={"prose", "think"}).run(n, [*PROMPT, 2 + i])
        m = min(n, len(alone))
        assert together[i][:m] == alone[:m]


@pytest.mark.parametrize(
    ("prompt", "region"),
    [
        ([1, 0, 2], "prose"),  # the message with the think block has ended
        ([2, 0, 1, 7], "think"),
        ([2, 0, 7, 5, 6, 7], "code"),
        ([2, 0, 11, 3], "structured"),
    ],
)
def test_a_text_goes_on_in_what_its_prompt_left_open(prompt, region):
    script = Undecided()
    for named in REGIONS:
        out, _, _ = decode(script, Regions(**{named: Margin(1.0)}), Window(0), 4, 12, prompt)
        expected = [10] * 4 if named == region else [2]
        assert out[0][: len(expected)] == expected


def test_a_text_that_goes_on_elsewhere():
    """The tokens that the caller sends open and close regions, too."""
    script, gate = Undecided(), Regions(think=Margin(1.0))
    with ScriptedTarget(script.row, N_VOCAB, pieces=PIECES) as target, Engine(target) as engine:
        target.protect(PROTECTED, [EOG])
        drafter = CallbackDrafter(lambda history: script.draft(history, 3))
        engine.configure(gate, Window(0), [(drafter, 3)], resumable=True)
        engine.begin([2])
        seen = []
        for sent in ([], [1], [8], [1]):
            if sent:
                engine.resume(len(engine.history()), sent)
            engine.round()
            seen.append([token for _, token in engine.tokens()])
        assert seen == [[2], [10, 10, 10, 2], [2], [10, 10, 10, 2]]


# ---- Windows of several kinds ----------------------------------------------------------------------------------------


class Mixed(Oracle):
    """What stands at once in some regions, and with a window in others."""

    def __init__(self, *arguments, at_once, **options):
        super().__init__(*arguments, **options)
        self.at_once = at_once

    def defers(self, text, token, choice, n_left):
        if {token, choice} & CONTROL or not self.passes(text, token):
            return False
        if region_behind(text, token, choice) in self.at_once:
            return True
        return super().defers(text, token, choice, n_left)

    def stands(self, text, rest):
        *before, token = text
        if region_behind(before, token, self.script.choice(before)) in self.at_once:
            return True
        return super().stands(text, rest)


@settings(max_examples=100)
@given(scripts, st.sets(st.sampled_from(REGIONS), min_size=1, max_size=4), windows, st.integers(0, 8))
def test_what_stands_at_once_beside_windows(script, at_once, window, k):
    class Own(Margin):
        @property
        def window(self):
            return window

    class AtOnce(Margin):
        @property
        def window(self):
            return Window(0)

    n = 30
    gate = Regions(**{region: (AtOnce if region in at_once else Own)(1.5) for region in REGIONS})
    out, _, _ = decode(script, gate, None, k, n)
    expected = Mixed(script, 1.5, window, k, 4096, at_once=at_once).run(n, [*PROMPT, 2])
    m = min(len(out[0]), len(expected))
    assert m >= min(n, len(expected)) and out[0][:m] == expected[:m]


# ---- On a model ------------------------------------------------------------------------------------------------------


def test_a_grammar_makes_an_answer_structured(tiny_target, tiny_draft):
    options = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "window": Window(0)}
    everywhere_else = Regions(**{region: Entropy(0.0) for region in REGIONS if region != "structured"})
    grammar = LlamaGrammar.from_string('root ::= ([a-z0-9 .$=]+ "\\n")+', verbose=False)
    drafter = DraftModel(tiny_draft)
    with closing(FlyLlama(tiny_target, drafter=drafter, gate=everywhere_else, draft_max=6, **options)) as llm:
        llm.trace = True
        llm("Ann had 12 apples and ate 5 of them.", max_tokens=40, temperature=0.0)
        free = llm.stats
        loose = [record.region for record in llm.records if record.origin == "loose"]
        assert dict(free.loose_by_region) == {region: loose.count(region) for region in REGIONS}
        assert sum(dict(free.committed_by_region).values()) == free.committed and loose
        assert free.as_dict()["loose_by_region"]["prose"] == loose.count("prose")
        for temperature in (0.0, 1.0):
            llm.reset_stats()
            llm("Ann had 12 apples.", max_tokens=40, temperature=temperature, seed=1, grammar=grammar)
            assert dict(llm.stats.committed_by_region)["structured"] == llm.stats.committed > 0
            assert llm.stats.loose_accepted == 0
        llm.gate = Exact()
        llm.reset_stats()
        llm("Ann had 12 apples.", max_tokens=4, temperature=0.0)
        assert llm.stats.committed_by_region == () and llm.records[0].region == ""
