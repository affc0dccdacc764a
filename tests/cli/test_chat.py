"""`pyfly-cpp chat` through a pipe, and at a pseudo-terminal."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from gguf_edit import edit_gguf

import pyfly_cpp
from pyfly_cpp.cli import chat_command as chats
from pyfly_cpp.cli.reader import PipeReader
from pyfly_cpp.decoding.presets import load_preset
from pyfly_cpp.engine.output import Output, Piece, Token
from pyfly_cpp.engine.vocabulary import Vocabulary
from pyfly_cpp.llama.fly_llama import FlyLlama

from .conftest import DRAFT, TARGET

QUESTION = "Tom has 3 apples and buys 4 more. How many apples has he?"


def chat(run, *arguments, stdin):
    # What the governor drafts depends on the clock.
    fixed = ("-t", 1, "-n", 40, "--no-adaptive", "--gate", "margin:0.3", "--temperature", 0)
    return run("chat", "-m", TARGET, "-d", DRAFT, *fixed, *arguments, stdin=stdin)


def test_answers_on_stdout_and_the_rest_on_stderr(run):
    result = chat(run, stdin=f"{QUESTION}\n\nAnd she?\n")
    assert result.code == 0
    assert result.out.strip()
    assert "tiny-llama-target-f16.gguf" in result.err
    assert "drafts: draft model tiny-llama-draft-f16.gguf; gate: margin:0.3, window: none" in result.err
    assert "lossy" in result.err and "/gate exact" in result.err
    lines = [line for line in result.err.splitlines() if "tokens per step" in line]
    assert len(lines) == 2  # one for each answer, about that answer
    assert int(re.findall(r"(\d+) tokens in", lines[1])[0]) <= 40


@pytest.mark.parametrize("more", [(), ("--drafter", "none"), ("--preset", "fast"), ("--gate", "stochastic")])
def test_what_a_start_shows_is_short_and_the_rest_is_in_stats(run, monkeypatch, more):
    monkeypatch.setattr(PipeReader, "interactive", True)
    monkeypatch.setattr("pyfly_cpp.cli.loading.embedded_model", lambda: TARGET)
    model, drafts, helped, _ = run("chat", "-t", 1, *more).err.splitlines()
    assert TARGET.name in model and "demo model" in model and "drafts" in drafts and "/help" in helped
    assert ("lossy" in drafts) == ("fast" in more) and ("gate: " in drafts) == ("none" not in more)
    details = run("chat", "-t", 1, *more, stdin="/stats\n").err.partition("/help")[2]
    words = (pyfly_cpp.__version__, "on the CPU, 1 thread", "temperature", "top-k", "drafter", "gate: ", "tokens used")
    assert [word for word in words if word not in details] == []
    assert "demo model" not in run("chat", "-m", TARGET, "-t", 1).err


def test_the_context_used_and_left_is_shown(run):
    result = chat(run, "-n", 8, "-c", 512, stdin=f"{QUESTION}\nAnd she?\n/reset\nAnd she?\n")
    shown = [tuple(map(int, found)) for found in re.findall(r"(\d+) of (\d+) tokens used, (\d+) left", result.err)]
    assert len(shown) == 3 and all(used + left == n_ctx == 512 for used, n_ctx, left in shown)
    first, second, anew = (used for used, _, _ in shown)
    assert second > first > anew > 8


def test_a_window_that_fits_in_no_step_is_told_once(run):
    result = chat(run, "--draft-max", 3, "--window", "agree", stdin=f"{QUESTION}\n{QUESTION}\n")
    (line,) = [line for line in result.err.splitlines() if "never accepts" in line]
    assert "margin:0.3" in line and "agree:6" in line and "reconverge:6" in line, "what it is, and what to choose"
    for fine in (["--gate", "exact"], ["--window", "agree:2"], ["--drafter", "none"]):
        draft = [] if "none" in fine else ["-d", DRAFT]
        result = run("chat", "-m", TARGET, *draft, "-t", 1, "-n", 9, "--draft-max", 3, "--window", "agree", *fine,
                     stdin=f"{QUESTION}\n")  # fmt: skip
        assert "never accepts" not in result.err


def test_the_window_follows_the_gate(run, tmp_path):
    file = tmp_path / "talk.json"
    result = chat(run, stdin=f"/gate entropy:0.4\n/gate margin:0.2\n/save {file}\n/load {file}\n/gate entropy:0.5\n")
    assert "; gate: margin:0.3, window: none" in result.err
    gates = [line for line in result.err.splitlines() if line.startswith("gate: ")]
    own = {"margin": "none", "entropy": "agree:6"}
    assert len(gates) == 4 and all(line.endswith(own[line[6:].partition(":")[0]]) for line in gates)
    result = chat(run, "--window", 3, stdin="/gate entropy:0.4\n")
    assert "gate: margin:0.3, window: agree:3" in result.err and "gate: entropy:0.4, window: agree:3" in result.err
    assert json.loads(file.read_text())["settings"]["window"] is None
    result = chat(run, "--window", 3, stdin=f"/save {file}\n/gate stochastic\n/load {file}\n/gate entropy:0.4\n")
    assert "has no use for the window agree:3" in result.err and "gate: entropy:0.4, window: agree:3\n" in result.err


def test_exact_equals_plain(run):
    drafted = chat(run, "--gate", "exact", stdin=f"{QUESTION}\n")
    plain = run("chat", "-m", TARGET, "--drafter", "none", "-t", 1, "-n", 40, "--temp", 0, stdin=f"{QUESTION}\n")
    assert drafted.out == plain.out
    assert "lossy" not in drafted.err
    assert "drafts: none" in plain.err


def test_commands(run):
    result = chat(run, stdin=f"/help\n/gate\n/gate exact\n{QUESTION}\n/stats\n/reset\n/exit\nnever read\n")
    assert result.code == 0
    assert "/save FILE" in result.err and "Alt-Enter" in result.err
    assert "gate: exact" in result.err
    assert "1 answer in this conversation" in result.err
    assert "forgotten" in result.err
    assert result.err.count("tokens per step") == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/gate marign:1", "Did you mean 'margin'?"),
        ("/rest", "Did you mean /reset?"),
        ("/load", "write /load FILE"),
        ("/load nowhere.json", "cannot read 'nowhere.json'"),
        (f"/load {DRAFT}", "not a conversation saved by /save"),
        (f"/save {TARGET}", "choose another name"),
        ("/save /no/such/folder/x", "Error: "),
    ],
)
def test_wrong_commands_are_one_line_and_the_chat_goes_on(run, line, message):
    result = chat(run, stdin=f"{line}\n{QUESTION}\n")
    assert message in result.err
    assert result.out.strip()
    assert result.code == 1


def test_a_gate_without_the_distributions_it_needs_is_refused_at_once(run):
    options = ("--drafter", "lookup", "-t", 1, "-n", 4)
    refused = run("chat", "-m", TARGET, *options, "--gate", "fuzzy-js:0.1", stdin=f"{QUESTION}\n")
    assert refused.code == 1 and not refused.out and "prompt lookup has none; use a draft model" in refused.err
    kept = run("chat", "-m", TARGET, *options, stdin=f"/gate fuzzy-js:0.1\n{QUESTION}\n/gate\n")
    assert "prompt lookup has none" in kept.err and kept.out.strip() and "gate: exact" in kept.err[-300:]
    kept = run(
        "chat", "-m", TARGET, "-d", DRAFT, "--gate", "fuzzy-js:0.1", "-t", 1, stdin="/drafter lookup\n/drafter\n"
    )
    assert "prompt lookup has none" in kept.err and "draft model tiny-llama-draft" in kept.err[-300:]
    with pytest.raises(ValueError, match="compares the draft's distribution"):
        FlyLlama(TARGET, drafter="lookup", gate="all(fuzzy-js:0.1,exact-first:8)", n_ctx=256, verbose=False)


def test_a_question_with_a_slash(run):
    assert chat(run, stdin="//etc?\n").out.strip()


def test_backslash_continues_a_line(run):
    both = chat(run, "--show-drafts", stdin="Tom has\\\n3 apples.\n")
    assert both.err.count("tokens per step") == 1


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ('"""\nTom has\n\n3 apples.\n"""\nAnd she?\n', ["Tom has\n\n3 apples.", "And she?"]),
        ('"""Tom has\\\n/etc\r\nexit"""  \n', ["Tom has\\\n/etc\nexit"]),
        ('"""/stats"""\n"""exit"""\nexit\nSay A\n', ["/stats", "exit"]),
        ('""" """\n""""""\nTom has """3""" apples.\n', ['Tom has """3""" apples.']),
        ('"""\nTom has\n3 apples.', ["Tom has\n3 apples."]),
        ("", []),
    ],
    ids=["lines", "as it is", "no commands", "empty", "not closed", "nothing"],
)
def test_three_quotes_hold_a_message_of_several_lines(run, tmp_path, monkeypatch, typed, messages):
    said = []

    def answer(self, messages, **kwargs):
        said.append(messages[-1]["content"])
        yield Piece("Well", (Token(5, "Well"),), 1, "stop")

    monkeypatch.setattr(FlyLlama, "write_chat", answer)
    assert chat(run, stdin=typed).code == 0
    assert said == messages


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "/quit", "/bye"])
def test_words_that_leave(run, word):
    result = chat(run, stdin=f" {word} \n{QUESTION}\n")
    assert result.code == 0 and not result.out


def test_words_that_list(run, monkeypatch):
    monkeypatch.setattr(PipeReader, "interactive", True)
    listed = [chat(run, stdin=f"{word}\n").err.partition("Ctrl-D leaves")[2] for word in ("/help", "/?")]
    assert listed[0] == listed[1] and all(word in listed[0] for word in ('"""', "exit", "/?"))


def talk_of(run, tmp_path, stdin, *arguments):
    """The conversation after these lines, and what was said."""
    file = tmp_path / "talk.json"
    result = chat(run, "-n", 8, *arguments, stdin=f"{stdin}/save {file}\n")
    return json.loads(file.read_text()), result


def test_undo_and_regenerate(run, tmp_path):
    one, _ = talk_of(run, tmp_path, f"{QUESTION}\n")
    two, result = talk_of(run, tmp_path, f"{QUESTION}\nAnd Anna?\n/undo\n")
    assert two["messages"] == one["messages"] and "forgotten: 'And Anna?'" in result.err
    again, result = talk_of(run, tmp_path, f"{QUESTION}\n/regenerate\n")
    assert again["messages"] == one["messages"] and "likely to be the same one" in result.err
    assert result.out == 2 * (one["messages"][1]["content"] + "\n")
    other, result = talk_of(
        run, tmp_path, f"{QUESTION}\n/set temperature 5\n/set top-k 0\n/set min-p 0\n/set top-p 1\n/regenerate\n"
    )
    assert other["messages"] != one["messages"] and len(other["messages"]) == 2 and "the same one" not in result.err
    for command in ("/undo", "/regenerate"):
        assert "there is no message yet" in chat(run, stdin=f"{command}\n").err


def test_another_start_is_another_answer(run, tmp_path):
    # With less than any token at all, an answer of a few tokens comes twice now and then.
    varied = ("--temperature", 5, "--top-k", 0, "--min-p", 0, "--top-p", 1)
    talks = [talk_of(run, tmp_path, f"{QUESTION}\n", *varied)[0]["messages"] for _ in range(2)]
    assert talks[0] != talks[1]


def test_a_failed_regeneration_keeps_the_answer(run, tmp_path, monkeypatch):
    good = FlyLlama.write_chat
    calls = []

    def flaky(self, messages, **kwargs):
        calls.append(messages)
        return good(self, messages, **kwargs) if len(calls) == 1 else (1 / 0 for _ in range(1))

    monkeypatch.setattr(FlyLlama, "write_chat", flaky)
    talk, _ = talk_of(run, tmp_path, f"{QUESTION}\n/regenerate\n")
    assert len(calls) == 2 and len(talk["messages"]) == 2 and talk["messages"][1]["content"]


def test_read_puts_a_file_before_the_next_message(run, tmp_path):
    (tmp_path / "a b.txt").write_text("Tom has 3 apples.\n")
    talk, result = talk_of(run, tmp_path, f"/read '{tmp_path / 'a b.txt'}'\nHow many?\nAnd now?\n")
    assert [m["content"] for m in talk["messages"][::2]] == ["Tom has 3 apples.\nHow many?", "And now?"]
    assert "tokens of" in result.err and "before your next message" in result.err
    (tmp_path / "long.txt").write_text("word " * 9000)
    (tmp_path / "binary").write_bytes(TARGET.read_bytes()[:10_000])
    for bad, message in ((tmp_path / "none.txt", "cannot be read"), (tmp_path / "binary", "is not UTF-8"),
                         ("", "write /read FILE"), (tmp_path / "long.txt", "the context holds 2048")):  # fmt: skip
        result = chat(run, stdin=f"/read {bad}\n")
        assert result.code == 1 and message in result.err


def test_ctrl_c_before_the_first_word_forgets_the_message_alone(run, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("Tom has 3 apples.")
    write, is_stopped = FlyLlama.write_chat, iter([True, False, True, True])

    def stopped(llm, messages, **request):
        if next(is_stopped):
            raise KeyboardInterrupt
        return write(llm, messages, **request)

    monkeypatch.setattr(FlyLlama, "write_chat", stopped)
    monkeypatch.setattr(PipeReader, "interactive", True)
    talk, result = talk_of(run, tmp_path, f"/read {tmp_path / 'a.txt'}\nSay it.\nHow many?\n/regenerate\nAnd now?\n")
    assert [m["content"] for m in talk["messages"][::2]] == ["Tom has 3 apples.\nHow many?"]
    assert re.findall(r"\(stopped before the first word; (.*)\)", result.err) == [
        "your message was forgotten; what was read goes before the next one",
        "the conversation is as before",
        "your message was forgotten",
    ]


def test_files_that_do_not_fit_together_are_refused_and_undone(run, tmp_path):
    (tmp_path / "part.txt").write_text("a " * 600)
    read = f"/read {tmp_path / 'part.txt'}\n"
    talk, result = talk_of(run, tmp_path, f"{read}{read}/undo\n{QUESTION}\n{read}/undo\n/undo\n", "-c", 1024)
    assert result.err.count("go before your next message") == 2
    assert all(part in result.err for part in ("the context holds 1024; ", ", /undo those, ", "raise --n-ctx"))
    assert result.err.count("forgotten: what was read") == 2 and not talk["messages"]
    result = chat(run, "-c", 1024, stdin=f"{read}{'a ' * 500}\n")
    assert "; /undo what was read, or raise --n-ctx" in result.err


def test_the_system_prompt_and_settings_change_between_turns(run, tmp_path):
    lines = "/system\n/system Be brief.\n/set temperature 0.5\n/set seed 7\n/set max-tokens 3\n/set\n"
    talk, result = talk_of(run, tmp_path, f"{lines}{QUESTION}\n")
    assert talk["system"] == "Be brief." and "(system prompt: none)" in result.err
    assert (talk["settings"]["temperature"], talk["settings"]["seed"]) == (0.5, 7)
    assert "cut off by --max-tokens" in result.err and "top-p 0.95" in result.err
    talk, _ = talk_of(run, tmp_path, '/system ""\n/set seed none\n', "--system", "Be brief.", "--seed", 3)
    assert talk["system"] is None and talk["settings"]["seed"] is None
    for bad, message in (("temperature x", "temperature cannot be 'x'"), ("temperature -1", "cannot be '-1'"),
                         ("n_ctx 3", "no setting 'n_ctx'"), ("seed none", "(seed none)")):  # fmt: skip
        assert message in chat(run, stdin=f"/set {bad}\n").err


def test_save_and_load(run, tmp_path):
    file = tmp_path / "talk to me.json"
    saved = chat(
        run,
        "--system",
        "Be brief.",
        "--temperature",
        0.5,
        "--seed",
        1,
        stdin=f"{QUESTION}\n/gate exact\n/save '{file}'\n",
    )
    data = json.loads(file.read_text())
    assert [m["role"] for m in data["messages"]] == ["user", "assistant"]
    assert data["messages"][1]["content"] in saved.out
    assert data["system"] == "Be brief."
    again = tmp_path / "again.json"
    loaded = chat(run, stdin=f"/load '{file}'\n/save '{again}'\n")
    assert "loaded 2 messages" in loaded.err
    restored = json.loads(again.read_text())
    assert restored["messages"] == data["messages"]
    assert restored["settings"] == data["settings"]
    assert restored["settings"]["temperature"] == 0.5


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_byte_that_is_not_utf8_is_replaced_and_the_chat_goes_on(run, tmp_path, errors):
    file = tmp_path / "talk.json"
    stdin = b"Caf\xe9 \xff?\n" + f"{QUESTION}\n/save {file}\n".encode()
    result = run("chat", "-m", TARGET, "-t", 1, "-n", 8, stdin=stdin, errors=errors)
    assert result.code == 0, result.err
    assert "(the message is not valid UTF-8: 2 characters were replaced by \ufffd)" in result.err
    assert [m["content"] for m in json.loads(file.read_text())["messages"]][::2] == ["Caf\ufffd \ufffd?", QUESTION]


def test_a_system_prompt_that_is_not_utf8(run):
    result = chat(run, "--system", "Be \udce9brief.", stdin=f"{QUESTION}\n")
    assert result.code == 0 and "(--system is not valid UTF-8: one character was replaced" in result.err


def test_a_turn_that_failed_leaves_no_trace(run, monkeypatch, tmp_path):
    """Whatever fails, and wherever in the turn."""
    good, file = FlyLlama.write_chat, tmp_path / "talk.json"
    n_calls = 0

    def flaky(self, messages, **kwargs):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 2:
            raise ZeroDivisionError("a chat template can raise anything")
        pieces = good(self, messages, **kwargs)
        if n_calls == 3:
            return (piece if i < 4 else 1 / 0 for i, piece in enumerate(pieces))
        return pieces

    monkeypatch.setattr(FlyLlama, "write_chat", flaky)
    result = chat(run, stdin=f"{QUESTION}\nsecond\nthird\nfourth\n/save {file}\n")
    assert result.code == 1 and result.err.count("Error: ") == 2
    assert [m["content"] for m in json.loads(file.read_text())["messages"]][::2] == [QUESTION, "fourth"]


def test_save_touches_no_other_file(run, tmp_path):
    file, victim = tmp_path / "talk.json", tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "talk.json.tmp").symlink_to(victim)
    assert chat(run, stdin=f"{QUESTION}\n/save {file}\n").code == 0
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["talk.json", "talk.json.tmp", "victim"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.update(messages="hello"),
        lambda data: data.update(messages=[{"role": "root", "content": ""}]),
        lambda data: data["settings"].update(temperature="hot"),
        lambda data: data["settings"].update(gate="margin:x"),
        lambda data: data["settings"].update(window=True),
        lambda data: data["settings"].update(max_tokens=2**31),
        lambda data: data["settings"].update(temperature=float("nan")),
        lambda data: data["settings"].update(seed=-1),
        lambda data: data["settings"].update(window="none"),
        lambda data: data.update(version=99),
    ],
)
def test_a_bad_file_loses_nothing(run, tmp_path, damage):
    good, bad, after = tmp_path / "good.json", tmp_path / "bad.json", tmp_path / "after.json"
    chat(run, stdin=f"{QUESTION}\n/save {good}\n")
    data = json.loads(good.read_text())
    damage(data)
    bad.write_text(json.dumps(data))
    result = chat(run, stdin=f"/load {good}\n/load {bad}\n/save {after}\n")
    assert result.err.count("Error: ") == 1
    assert json.loads(after.read_text()) == json.loads(good.read_text())


def test_load_takes_no_traceback_and_loses_nothing_whatever_it_reads(run, tmp_path):
    """Random JSON in place of random parts of a saved conversation; after each /load the chat saves what it has."""
    good = tmp_path / "good.json"
    chat(run, stdin=f"{QUESTION}\n/save {good}\n")
    data, rng = json.loads(good.read_text()), random.Random(13)
    values = [
        None,
        True,
        -1,
        0,
        2**31,
        2**63,
        10**400,
        1e308,
        -0.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\ud800",
        "\0",
    ]
    values += [
        [],
        {},
        [[]],
        {"role": "user", "content": "\udfff"},
        "all(" * 5000,
        "margin:" + "9" * 400,
        "\x1b]52;c;x\x07",
    ]

    def damage(value):
        if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
            key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
            value[key] = damage(value[key])
            return value
        return rng.choice(values)

    lines = [f"/load {good}"]
    for i in range(300):
        (tmp_path / f"{i}.json").write_text(json.dumps(damage(copy.deepcopy(data))))
        lines += [f"/load {tmp_path / f'{i}.json'}", f"/save {tmp_path / f'after{i}.json'}", f"/load {good}"]
    result = run("chat", "-m", TARGET, "-t", 1, stdin="\n".join(lines) + "\n")
    saved = [json.loads((tmp_path / f"after{i}.json").read_text()) for i in range(300)]
    n_refused = result.err.count("Error: ")
    assert 100 < n_refused < 300, "the fuzzer must do both"
    assert sum(after == data for after in saved) >= n_refused


def test_load_reads_no_device_and_nothing_endless(run, tmp_path):
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    os.mkfifo(tmp_path / "pipe")
    result = run(
        "chat", "-m", TARGET, "-t", 1, stdin=f"/load {tmp_path}/huge\n/load {tmp_path}/pipe\n/load /dev/zero\n"
    )
    assert result.err.count("is not a conversation saved by /save; nothing was loaded.") == 3


def test_show_drafts_without_colours(run):
    plain = chat(run, stdin=f"{QUESTION}\n").out
    marked = chat(run, "--show-drafts", stdin=f"{QUESTION}\n")
    assert "[-rejected draft-]" in marked.err  # the legend
    assert "[-" in marked.out
    without = re.sub(r"\[-.*?-\]", "", marked.out)
    assert without.replace("{+", "").replace("+}", "").replace("<", "").replace(">", "") == plain.replace(
        "<", ""
    ).replace(">", "")


def test_show_drafts_in_colour(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = chat(run, "--show-drafts", stdin=f"{QUESTION}\n")
    assert "\x1b[32m" in result.out  # matched
    assert "\x1b[9m" in result.out or ";9m" in result.out  # struck
    assert "[-" not in result.out


def test_a_long_conversation_forgets_its_oldest_turns_and_says_so(run):
    result = chat(run, "-c", 256, stdin=f"{QUESTION}\n" * 8)
    assert result.code == 0
    assert "outgrown the context of 256 tokens" in result.err
    assert "/reset" in result.err
    assert result.err.count("tokens per step") == 8


def test_a_message_that_cannot_fit(run):
    result = chat(run, "-c", 256, stdin="many words " * 400 + f"\n{QUESTION}\n")
    assert "the context holds 256" in result.err
    assert result.out.strip()  # the next message is answered
    assert result.code == 1


def test_ctrl_c_ends_a_chat_through_a_pipe():
    """At a terminal it stops the answer; a script that is stopped must not go on with the next message."""
    endless = ("--temperature", "5", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-n", "0")
    command = [sys.executable, "-m", "pyfly_cpp", "chat", "-m", str(TARGET), "-t", "1", *endless]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        process.stdin.write(f"{QUESTION}\n".encode() * 50)  # an answer may end by chance
        process.stdin.flush()
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) != 0
        assert "Traceback" not in process.stderr.read().decode()
    finally:
        process.kill()
        process.communicate()


def test_a_huge_file_is_not_read(run, tmp_path):
    huge = tmp_path / "huge.txt"
    with open(huge, "wb") as file:
        file.truncate(1 << 40)  # a hole
    started = time.monotonic()
    result = chat(run, stdin=f"/read {huge}\n")
    assert result.code == 1 and "huge.txt" in result.err and time.monotonic() - started < 60


def recommending(tmp_path, **sampling):
    """The target, with a recommendation in its metadata."""
    return edit_gguf(TARGET, tmp_path / "target.gguf", {f"general.sampling.{k}": v for k, v in sampling.items()})


@pytest.mark.parametrize("drafting", [["--drafter", "none"], ["-d", DRAFT, "--draft-max", 6]], ids=["plain", "drafts"])
def test_a_seed_is_the_same_whenever_it_is_set(run, drafting, tmp_path):
    """With one, the answer does not depend on what is drafted."""
    start = ["chat", "-m", TARGET, *drafting, "-t", 1, "-n", 20]
    given = run(*start, "--seed", 5, stdin=f"{QUESTION}\n")
    changed = run(*start, stdin=f"/set seed 5\n{QUESTION}\n")
    assert given.out == changed.out and given.code == changed.code == 0
    loaded = run(
        *start, stdin=f"/set seed 5\n/save {tmp_path / 'a'}\n/set seed 6\n/load {tmp_path / 'a'}\n{QUESTION}\n"
    )
    assert loaded.out == given.out
    own = run(*start, "--gate", "margin:0.2", stdin="/set seed 5\n/gate\n")
    assert "gate: margin:0.2" in own.err.splitlines()[-2] + own.err.splitlines()[-3]


def test_a_chat_is_sampled_as_the_model_recommends(run, tmp_path):
    target = recommending(tmp_path, temp=0.25, top_k=11)
    result = run("chat", target, "-t", 1, "-n", 4, stdin="/set\n/stats\n")
    assert result.err.count("temperature 0.25") == 2 and "top-k 11" in result.err and "gate: exact " in result.err
    assert "on the CPU, 1 thread\n" in result.err
    assert "temperature 0.5" in run("chat", target, "--temp", 0.5, "-t", 1, stdin="/set\n").err
    assert "gate: stochastic " in run("chat", target, "--gate", "stochastic", "-t", 1, stdin="").err


def test_an_answer_that_was_cut_off_is_continued(run, tmp_path):
    whole, _ = talk_of(run, tmp_path, f"{QUESTION}\n", "-n", 30)
    file = tmp_path / "parts.json"
    result = chat(run, "-n", 10, stdin=f"{QUESTION}\n/continue\n/continue\n/save {file}\n/undo\n/continue\n")
    assert json.loads(file.read_text())["messages"] == whole["messages"]
    assert result.code == 1 and "no answer to continue" in result.err


def test_a_format_ends_an_answer_that_is_continued(run, tmp_path):
    """Its stop strings are not part of the model's tokens."""
    talk, file = {}, tmp_path / "talk.json"
    for name, lines in (("whole", ""), ("parts", "/set max-tokens 120\n/continue\n")):
        n = 10 if name == "parts" else 120
        result = chat(run, "--chat-format", "snoozy", "-n", n, stdin=f"{QUESTION}\n{lines}/save {file}\n")
        assert result.code == 0
        talk[name] = json.loads(file.read_text())["messages"]
    assert talk["parts"] == talk["whole"] and "###" not in talk["parts"][1]["content"]


class Scripted:
    """Takes the place of a model that answers with these tokens: `write_chat` and `write` of a FlyLlama. Ctrl-C is
    pressed when so many tokens have come."""

    def __init__(self, monkeypatch, pieces, stop, n_until_interrupt=None):
        self.pieces, self.stop, self.n_until_interrupt = pieces, stop, n_until_interrupt
        monkeypatch.setattr(Vocabulary, "piece", lambda vocabulary, token, special=False: pieces[token])
        monkeypatch.setattr(FlyLlama, "write_chat", lambda llm, messages, **request: self.write(0, **request))
        monkeypatch.setattr(FlyLlama, "write", lambda llm, prompt, **request: self.write_behind(prompt, **request))
        monkeypatch.setattr(chats, "hear_chat", lambda llm, messages: {"prompt": [-1, -1], "stop": stop})

    def write_behind(self, prompt, *, stop, stopping_criteria, **request):
        assert prompt == [-1, -1, *range(len(prompt) - 2)] and stop == self.stop
        self.n_until_interrupt = None
        yield from self.write(len(prompt) - 2, **request)

    def write(self, begin, max_tokens, **request):
        output = Output(self.pieces.__getitem__, lambda token: token == len(self.pieces), self.stop, max_tokens or None)
        for token in range(begin, len(self.pieces) + 1):
            if token == self.n_until_interrupt:
                raise KeyboardInterrupt
            piece = output.add(token)
            if piece.text or piece.finish:
                yield piece
            if piece.finish:
                return


@pytest.mark.parametrize("n", range(1, 8))
@pytest.mark.parametrize("is_stopped", [False, True])
def test_nothing_of_a_continued_answer_is_lost(run, tmp_path, monkeypatch, n, is_stopped):
    """Wherever it was cut: within a character, or where a stop string may have begun."""
    pieces = [b"A", b" \xf0\x9f", b"\x99", b"\x82", b" B E", b"N", b"C", b" D"]
    Scripted(monkeypatch, pieces, ["END"], n if is_stopped else None)
    monkeypatch.setattr(PipeReader, "interactive", is_stopped)
    file = tmp_path / "talk.json"
    result = chat(run, "-n", 0 if is_stopped else n, stdin=f"{QUESTION}\n/set max-tokens 0\n/continue\n/save {file}\n")
    assert json.loads(file.read_text())["messages"][1]["content"] == "A \U0001f642 B ENC D", result.err


def test_words_of_other_programs(run):
    result = run(
        "chat", TARGET, "-md", DRAFT, "--ctx-size", 300, "--temp", 0, "-ngl", 0, "-t", 1, "-n", 4,
        stdin=f"{QUESTION}\n/clear\n/stats\n/bye\n{QUESTION}\n",
    )  # fmt: skip
    assert result.code == 0 and "tiny-llama-draft" in result.err and "0 answers in this conversation" in result.err
    assert len(result.out.splitlines()) == 1 and "context of 512 tokens" in result.err
    assert run("chat", TARGET, "-m", TARGET).code == 2


def test_presets_and_drafters_change_in_a_chat(run):
    lines = f"/preset fast\n/preset nothing\n/drafter none\n{QUESTION}\n/drafter draft:{DRAFT}\n/drafter x\n/drafter\n"
    result = run("chat", "-m", TARGET, "-t", 1, "-n", 8, stdin=lines)
    assert f"gate: {load_preset('fast').decoding.gate}," in result.err and result.err.count("Error: ") == 2
    assert "no drafter (/drafter none)" in result.err
    assert result.err.count("drafter: draft model tiny-llama-draft-f16.gguf") == 2


def test_an_option_of_the_first_drafter_is_no_obstacle_to_another(run):
    lines = f"/drafter draft:{DRAFT}\n/drafter lookup\n"
    result = run("chat", "-m", TARGET, "--drafter", "lookup", "--num-pred-tokens", 5, "-t", 1, stdin=lines)
    assert result.code == 0 and "Error" not in result.err


def test_an_empty_answer_is_not_continued_with_an_earlier_one(run, monkeypatch):
    answers = [("Well", "length"), ("", "stop")]

    def answer(self, messages, **kwargs):
        text, finish = answers.pop(0)
        yield Piece(text, (Token(5, text),), 1, finish)

    monkeypatch.setattr(FlyLlama, "write_chat", answer)
    result = chat(run, stdin=f"{QUESTION}\n{QUESTION}\n/continue\n")
    assert "there is no answer to continue" in result.err
    assert "write a message first" in chat(run, stdin="/continue\n").err


@pytest.mark.parametrize("period", [1, 7, None])
def test_a_loop_is_named(run, monkeypatch, period):
    def answer(self, messages, **kwargs):
        for i in range(200):
            token = i * i % 1009 if period is None or i < 50 else i % period
            yield Piece("x ", (Token(token, "x "),), i + 1, "length" if i == 199 else None)

    monkeypatch.setattr(FlyLlama, "write_chat", answer)
    result = chat(run, stdin=f"{QUESTION}\n")
    assert ("again and again" in result.err) == (period is not None) and result.out.count("x") == 200


# ---- At a terminal ---------------------------------------------------------------------------------------------------

pty = pytest.importorskip("pty")


PROMPT = "\x1b[?2004h"  # prompt_toolkit reads
READ = "\x1b[?2004l"  # and has read
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"  # the cursor


class Terminal:
    """A chat at a pseudo-terminal."""

    def __init__(self, tmp_path, *arguments, term="xterm"):
        self.master, slave = pty.openpty()
        environment = {
            **os.environ,
            "XDG_STATE_HOME": str(tmp_path),
            "TERM": term,
            "COLUMNS": "200",
            "PROMPT_TOOLKIT_NO_CPR": "1",
        }
        command = [sys.executable, "-m", "pyfly_cpp", "chat", "-m", str(TARGET), "-t", "1", *arguments]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.seen, self.at = "", 0

    def wait_for(self, text, timeout=60.0):
        """Reads until the text has come, after what was waited for before."""
        end = time.monotonic() + timeout
        while text not in self.seen[self.at :]:
            self.read_more(text, end)
        self.at = self.seen.index(text, self.at) + len(text)

    def read_more(self, text, end):
        ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
        try:
            data = os.read(self.master, 65536) if ready else b""
        except OSError:
            data = b""
        if not data:
            raise AssertionError(f"{text!r} did not come; seen: {self.seen[self.at :]!r}")
        self.seen += data.decode("utf-8", errors="replace")

    def wait_for_answer(self):
        """Reads until the message has been read, the progress bar was taken away, and some of the answer has come."""
        for each in (READ, HIDDEN, SHOWN):
            self.wait_for(each)
        end = time.monotonic() + 60.0
        while not re.search("[a-z]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen[self.at :])):
            self.read_more("an answer", end)

    def send(self, text):
        os.write(self.master, text.encode())

    def leave(self):
        """Presses Ctrl-D; the chat ends as it should."""
        self.wait_for(PROMPT)
        self.send("\x04")
        assert self.process.wait(timeout=10) == 0 and "Traceback" not in self.seen

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def start(*arguments, **settings):
        opened.append(Terminal(tmp_path, *arguments, **settings))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_terminal_ctrl_c_and_ctrl_d(terminal):
    # At this temperature a text ends after about a thousand tokens: the key is pressed at its first.
    t = terminal("--temperature", "5", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-n", "0")
    t.wait_for("Ctrl-D leaves")
    t.wait_for(PROMPT)
    t.send("\x03")
    t.wait_for("(Ctrl-D or /exit leaves)")
    t.wait_for(PROMPT)
    t.send(f"{QUESTION}\r")
    t.wait_for_answer()
    t.send("\x03")
    t.wait_for("stopped")
    t.wait_for(PROMPT)
    t.send("/stats\r")
    t.wait_for("1 answer in this conversation")  # what was said stays
    t.wait_for(PROMPT)
    t.send("\x04")
    t.wait_for("Goodbye.")
    assert t.process.wait(timeout=10) == 0
    assert "Traceback" not in t.seen


def test_a_terminal_without_escape_sequences(terminal):
    t = terminal("-n", "5", "--show-drafts", term="dumb")
    t.wait_for("> ")
    t.send(f"{QUESTION}\n")
    t.wait_for("tokens per step")
    t.wait_for("> ")
    t.send("\x04")
    t.wait_for("Goodbye.")
    assert t.process.wait(timeout=10) == 0 and "\x1b" not in t.seen and "Traceback" not in t.seen


def test_terminal_binary_garbage(terminal, tmp_path):
    t = terminal("-n", "5")
    t.wait_for(PROMPT)
    os.write(t.master, b"\x1b[200~caf\xe9 \xff\x00\x9b\xed\xa0\x80 end\x1b[201~\r")
    t.wait_for("is not valid UTF-8")
    t.wait_for("tokens per step")
    t.wait_for(PROMPT)
    t.send("and now?\r")
    t.wait_for("tokens per step")
    t.leave()
    assert "Error" not in t.seen
    assert "end" in (tmp_path / "pyfly-cpp" / "chat_history").read_text(encoding="utf-8")


def test_terminal_several_lines_and_history(terminal, tmp_path):
    t = terminal("-n", "5")
    t.wait_for(PROMPT)
    t.send("one\\\rtwo\x1b\rthree\r")
    t.wait_for("tokens per step")
    t.wait_for(PROMPT)
    t.send('"""four\rfive"""\r')
    t.wait_for("tokens per step")
    t.wait_for(PROMPT)
    t.send("exit\r")
    assert t.process.wait(timeout=10) == 0
    history = (tmp_path / "pyfly-cpp" / "chat_history").read_text()
    assert "+one\n+two\n+three\n" in history and '+"""four\n+five"""\n' in history


def test_typing_while_an_answer_comes(terminal):
    """It is not shown in the answer, and is the next message."""
    t = terminal("--temperature", "5", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-n", "300")
    t.wait_for(PROMPT)
    t.send(f"{QUESTION}\r")
    t.wait_for_answer()
    t.send("/stats \rTYPED")
    t.wait_for("tokens per step")
    assert "/stats" not in t.seen[: t.at].split(QUESTION)[-1]
    t.wait_for("1 answer in this conversation")
    t.wait_for("TYPED")


def test_what_a_start_waits_for_is_shown(terminal, monkeypatch):
    """While the weights load, llama-cpp-python sends stderr nowhere."""
    monkeypatch.setenv("PYFLY_COSTS", "1")
    t = terminal("-d", str(DRAFT))
    t.wait_for("loading tiny-llama-target")
    t.wait_for("measuring")
    t.wait_for(PROMPT)
