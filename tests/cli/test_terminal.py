"""What a model or a file says cannot steer the terminal; piped, it goes out as it is."""

from __future__ import annotations

import io
import json
import re
import socket
import sys
from types import SimpleNamespace

import click
import pytest

from pyfly_cpp.cli import progress
from pyfly_cpp.cli import terminal as terminals
from pyfly_cpp.cli.drafts import paint
from pyfly_cpp.cli.measuring import show_table
from pyfly_cpp.cli.terminal import AnswerWriter, Bar, note, shown, write
from pyfly_cpp.cli.text import piped_text
from pyfly_cpp.engine.output import Piece
from pyfly_cpp.llama.fly_llama import FlyLlama

from .conftest import TARGET

EVIL = "a\x1b]52;c;eA==\x07b\r\x08\x7f\x85\x9b2J\u202ec\u2066\td\n"
TAME = "a\\u001b]52;c;eA==\\u0007b\\u000d\\u0008\\u007f\\u0085\\u009b2J\\u202ec\\u2066\td\n"


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout and stderr look like a terminal."""

    def pretend():
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)

    return pretend


@pytest.mark.parametrize("at_terminal", [True, False])
def test_chat(run, monkeypatch, terminal, at_terminal):
    def answer(self, messages, **kwargs):
        return (Piece(char) for char in EVIL)

    monkeypatch.setattr(FlyLlama, "write_chat", answer)
    if at_terminal:
        terminal()
    result = run("chat", "-m", TARGET, "-t", 1, stdin="hello\n")
    assert (TAME if at_terminal else EVIL) in result.out
    assert at_terminal != ("\x1b]52" in result.out)


@pytest.mark.parametrize("at_terminal", [True, False])
def test_complete(run, terminal, tmp_path, at_terminal):
    grammar = tmp_path / "evil.gbnf"
    grammar.write_text('root ::= "\\x1b]0;x\\x07\\u009b"')
    if at_terminal:
        terminal()
    arguments = ("complete", "-m", TARGET, "-t", 1, "-n", 20, "--grammar", grammar, "Natalia")
    assert run(*arguments).out == ("\\u001b]0;x\\u0007\\u009b\n" if at_terminal else "\x1b]0;x\x07\x9b\n")
    written = run(*arguments, "--json").out
    assert json.loads(written)["text"] == "\x1b]0;x\x07\x9b"
    assert at_terminal != ("\x9b" in written)


def test_notes_and_errors(run, terminal, tmp_path):
    terminal()
    named, file = tmp_path / "\x1b]0;x\x07.json", tmp_path / "talk.json"
    file.write_text(json.dumps({"format": "pyfly-cpp conversation", "version": 1, "messages": [], "settings": {}}))
    settings = {"model": "\x1b]0;x\x07"}
    named.write_text(json.dumps({**json.loads(file.read_text()), "settings": settings}))
    result = run("chat", "-m", TARGET, "-t", 1, "-n", 4, stdin=f"/load '{named}'\n/gate \x1b]0;x\x07\n")
    assert "loaded 0 messages" in result.err and "saved with \\u001b]0;x\\u0007" in result.err
    assert "\x1b]0" not in result.err
    assert "\x1b]0" not in run("complete", "-m", tmp_path / "\x1b]0;x.gguf", "x").err


def test_marks_of_our_own_stay(capsys, terminal):
    terminal()
    painted = paint("\x1b[2J", "matched", colour=True)
    assert painted.startswith("\x1b[32m") and "\\u001b[2J" in painted and "\x1b[2J" not in painted


def test_names_with_brackets_are_no_markup(capsys, terminal):
    """Neither in a table nor in a progress bar, where `[/x]` was an error."""
    terminal()
    show_table("", ["category"], [["[/x]\x1b[2J"]])
    with Bar() as bar:
        bar.update("loading [/x]\x1b[2J", 1, 2, "50%")
    out, err = capsys.readouterr()
    assert "[/x]\\u001b[2J" in out and "[/x]\\u001b[2J" in err


def test_a_table_where_stdout_cannot_encode_it(monkeypatch):
    """As everything else: what cannot be shown is a question mark, and no table is lost for it."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", out)
    show_table("Speed", ["setting", "x"], [["plain", "\u2013"], ["exact", "1.5"]])
    out.flush()
    text = out.buffer.getvalue().decode("latin-1")
    assert "?" in text and "1.5" in text


def test_a_no_does_nothing_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(click, "confirm", lambda *_, **__: False)
    with pytest.raises(click.exceptions.Exit) as left:
        terminals.ask_for("this deletes everything", is_allowed=False)
    assert left.value.exit_code == 1 and "Nothing was done." in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "n_lines"), [(10.0, 5), (0.1, 0), (600.0, 25)])
def test_long_work_tells_in_lines_how_long_it_takes(monkeypatch, capsys, seconds, n_lines):
    """The first 2 of 32 answers are those of an earlier run."""
    now = [0.0]
    for module in (progress, terminals):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress.progress_bar("bench", 8, 4) as advance:
        for done in range(3, 33):
            now[0] += seconds
            advance(done, "an answer")
    begin, *lines = capsys.readouterr().err.splitlines()
    assert "8 answers" in begin and "4 settings" in begin and "32" in begin
    told = [line for line in lines if "left" in line]
    assert len(told) == n_lines and (len(lines) == n_lines or seconds > progress.EVERY)
    if seconds == 10.0:  # 25 more after 7 of 32
        assert "7 of 32" in told[0] and "4 minutes" in told[0]
    if seconds == 600.0:
        assert "4.2 hours" in told[0]


def test_a_bar_is_a_line_a_minute_without_a_terminal(monkeypatch, capfd):
    """Also while stderr leads nowhere, as it does while llama-cpp-python loads."""
    now = [0.0]
    monkeypatch.setattr(terminals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Bar() as bar:
        bar.update("loading m.gguf", 0.0, 1.0, "0%")
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        for percent in range(1, 100):
            now[0] += 1.5
            bar.update("loading m.gguf", percent / 100, 1.0, f"{percent}%")
        now[0] += 100
        bar.update("measuring", 0, None)
    assert capfd.readouterr().err.splitlines() == ["loading m.gguf: 40%", "loading m.gguf: 80%"]


def test_a_character_that_stdout_lacks_is_no_error(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    write("caf\u00e9 \U0001f600")
    assert stream.buffer.getvalue() == b"caf? ?"
    assert shown("\x1b", stream) == "\x1b"


def test_a_table_does_not_break_words(capsys, monkeypatch):
    head, body = (
        ["setting", "tokens/s [95% CI]", "x plain [95% CI]"],
        [["margin:0.3 reconverge:6", "10.0 [9.1, 11.2]", "1.1"]],
    )
    monkeypatch.setattr("pyfly_cpp.cli.measuring.terminal_width", lambda: 30)
    show_table("Speed", head, body)
    text = "Speed\nmargin:0.3 reconverge:6\n  tokens/s [95% CI]: 10.0 [9.1, 11.2]\n  x plain [95% CI]: 1.1\n"
    assert capsys.readouterr().out == text
    monkeypatch.setattr("pyfly_cpp.cli.measuring.terminal_width", lambda: 80)
    show_table("Speed", head, body)
    assert "margin:0.3 reconverge:6 ┃" in capsys.readouterr().out.replace("│", "┃")


class Screen:
    """As far as a terminal needs to be one for `AnswerWriter`."""

    def __init__(self, text):
        self.lines, at = [""], 0
        for part in re.split(r"(\x1b\[\d*[DK]|\n)", text):
            if part == "\n":
                self.lines.append("")
                at = 0
            elif part.endswith("D") and part.startswith("\x1b"):
                at -= int(part[2:-1])
            elif part == "\x1b[K":
                self.lines[-1] = self.lines[-1][:at]
            else:
                self.lines[-1] = self.lines[-1][:at] + part + self.lines[-1][at + len(part) :]
                at += len(part)


@pytest.mark.parametrize("columns", [20, 50, 80, 110])
def test_no_line_of_an_answer_breaks_in_a_word(monkeypatch, capsys, terminal, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal()
    words = ["a" * (1 + i * 7 % 13) + ("," if i % 5 == 0 else "") for i in range(200)]
    code = "```\n" + "x = 1 " * 40 + "\n```\n"
    text = " ".join(words) + "\n" + "-" * 300 + "\n" + code + "End of it."
    answer = AnswerWriter()
    for i in range(0, len(text), 3):
        answer.write(text[i : i + 3])
    lines = Screen(capsys.readouterr().out).lines
    prose = lines[: lines.index("```")]
    assert all(len(line) < columns for line in prose if " " in line)
    begin = next(i for i, line in enumerate(prose) if line.startswith("---"))
    assert " ".join(line.strip() for line in prose[:begin]).split() == words and "-" * 300 in prose
    assert "x = 1 " * 40 in lines, "code keeps its lines"


@pytest.mark.parametrize("columns", [50, 80, 110])
def test_no_note_breaks_in_a_word(monkeypatch, capsys, terminal, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal()
    text = "This is lossy: answers may differ from plain decoding. --gate exact or /gate exact turns it off. " * 3
    note(text)
    lines = click.unstyle(capsys.readouterr().err).splitlines()
    assert " ".join(lines).split() == text.split() and all(len(line) < columns for line in lines)


def test_a_table_keeps_words_where_there_is_just_enough_room(capsys, monkeypatch):
    head, body = ["setting", "a long heading of many words"], [["entropy:0.3 reconverge:6 k=4 lookup", "1.0 " * 9]]
    monkeypatch.setattr("pyfly_cpp.cli.measuring.terminal_width", lambda: 30)
    show_table("", head, body)
    assert "reconverge:6" in capsys.readouterr().out


def test_commands_to_copy_stay_on_their_line(monkeypatch, capsys, terminal):
    monkeypatch.setenv("COLUMNS", "40")
    terminal()
    command = "  pyfly-cpp chat --preset " + "a" * 20 + " --gate exact --draft-max 4"
    note("Use it:\n" + command)
    assert command in click.unstyle(capsys.readouterr().err).splitlines()


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="sockets as files")
def test_text_that_comes_through_a_socket(monkeypatch):
    """As Node.js gives it to its children; one on which nothing comes is not waited for."""
    for said, heard in ((b"text\n", "text"), (None, None)):
        ours, theirs = socket.socketpair()
        with theirs, open(ours.detach(), encoding="utf-8") as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            if said is not None:
                theirs.sendall(said)
                theirs.shutdown(socket.SHUT_WR)
            assert piped_text() == heard
