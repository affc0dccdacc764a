"""`pyfly-cpp chat`: answers on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pyfly_cpp._version import __version__
from pyfly_cpp.cli import conversation as conversations
from pyfly_cpp.cli import describe
from pyfly_cpp.cli.conversation import Conversation
from pyfly_cpp.cli.drafts import legend, marked, use_colour
from pyfly_cpp.cli.headings import Formatter, HeadedCommand
from pyfly_cpp.cli.kinds import DRAFTER
from pyfly_cpp.cli.loading import MODEL_ARGUMENT, NO_TEMPLATE, is_full, reading
from pyfly_cpp.cli.options import Options, shared_options
from pyfly_cpp.cli.reader import COMMANDS, LEAVING, MessageReader, make_reader, quoted
from pyfly_cpp.cli.terminal import AnswerWriter, folded, note, unseen_typing, warn, write, write_marked
from pyfly_cpp.cli.text import TEXT, file_named
from pyfly_cpp.decoding.gates import examples, parse_gate
from pyfly_cpp.decoding.presets import SHIPPED, load_preset
from pyfly_cpp.decoding.resolve import Resolved
from pyfly_cpp.engine.output import Piece, Token, whole_characters
from pyfly_cpp.engine.repetition import LoopWatch
from pyfly_cpp.errors import counted
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.llama.prompting import hear_chat
from pyfly_cpp.machine.files import file_text
from pyfly_cpp.machine.threads import AUTO
from pyfly_cpp.models.metadata import quantisation
from pyfly_cpp.models.ollama import shown_name

_MOST_BYTES = 64
"""Bytes of a token, on average: a longer file does not fit in the context, however it is read."""

HELP = {
    "/help": "this list; /? does the same",
    "/regenerate": "regenerate the last answer",
    "/continue": "continue an answer that was cut off or stopped",
    "/undo": "forget what was read and not sent, or else the last message and its answer",
    "/read FILE": "put the text of a file before the next message",
    "/system [TEXT]": 'show or set the system prompt; "" for none',
    "/set [NAME VALUE]": "show or change temperature, seed, max-tokens, top-p, ...",
    "/gate [GATE]": f"show or set the gate; exact and stochastic are lossless, others not: {examples(combined=False)}",
    "/preset NAME": f"accept drafts as a preset does: {', '.join(SHIPPED)}",
    "/drafter [WORD]": "show or change the drafter: none, lookup, draft:FILE, ...",
    "/stats": "drafter, gate, sampling, machine, and counters since the start",
    "/reset": "forget the conversation; /clear does the same",
    "/save FILE": "save the conversation and the settings",
    "/load FILE": "load a saved one",
    "/exit": "leave; Ctrl-D, exit, quit, /quit and /bye do the same",
}
_KEYS = (
    'Several lines: begin the message with """ and end it with """; or start a new line by Alt-Enter (or Esc, Enter), '
    "or by a backslash at the end of one. Ctrl-C stops an answer. A message that begins with a slash: write //. The "
    'word exit as a message: write """exit""".'
)


@click.command(
    "chat",
    cls=HeadedCommand,
    short_help="Talk to a model.",
    epilog="Example: pyfly-cpp chat -m target.gguf -d draft.gguf --system 'Be brief.'",
)
@MODEL_ARGUMENT
@click.option("--system", type=TEXT, metavar="TEXT", help="System prompt.")
@click.option("--show-drafts", is_flag=True, help="Mark each token by how it was produced, and show rejected drafts.")
@shared_options(in_chat=True)
def command(options: Options, system: str | None, show_drafts: bool) -> None:
    """Talk to a model. /help lists the commands inside. Piped input is read as one message a line; three quotes open
    and close one of several lines.

    Answers are sampled, and as good as those of the model alone unless you accept others: --preset fast, or --gate.
    """
    llm = options.load(FlyLlama, trace=show_drafts, names_demo=False)
    try:
        options = options.for_chat(llm.metadata)
        llm.decoding = options.decoding
        chat = ChatLoop(llm, options, Conversation(system), make_reader(), show_drafts)
        n_failed = chat.run()
    finally:
        llm.close()
    if n_failed and not chat.interactive:
        sys.exit(1)


def _understood(typed: str) -> tuple[str, str]:
    """(message, command): one of them is empty, or both. `exit` and `quit` leave, as in other programs."""
    text = typed.strip()
    message = quoted(text)
    if message is not None:
        return message, ""
    if text in ("exit", "quit"):
        return "", "/exit"
    return ("", text) if text.startswith("/") and not text.startswith("//") else (text.removeprefix("/"), "")


class ChatLoop:
    """The loop, and what it remembers."""

    def __init__(
        self, llm: FlyLlama, options: Options, conversation: Conversation, reader: MessageReader, show_drafts: bool
    ) -> None:
        self._llm = llm
        self._options = options
        self._conversation = conversation
        self._reader = reader
        self._show_drafts = show_drafts
        self._colour = use_colour()
        self._read = ""  # goes before the next message
        self._cut: dict[str, Any] | None = None  # what continues an answer that has not come to its end
        self.interactive = reader.interactive

    def run(self) -> int:
        """Talks until the user leaves; returns how many messages failed."""
        self._banner()
        n_failed = 0
        while True:
            try:
                typed = self._reader.read()
            except EOFError:
                if self.interactive:
                    note("Goodbye.")
                return n_failed
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                note("(Ctrl-D or /exit leaves)")
                continue
            try:
                message, order = _understood(typed)
                if order in LEAVING:
                    return n_failed
                if order:
                    self._run_command(order)
                elif message:
                    self._say(message)
            except KeyboardInterrupt:  # in the middle of a command, or once more in the middle of a stop
                if not self.interactive:
                    raise
                note("(stopped)")
            except BrokenPipeError:
                raise
            except Exception as error:  # a chat template may raise anything; the conversation outlives it
                if os.environ.get("PYFLY_DEBUG"):
                    raise
                n_failed += 1
                click.secho(folded(f"Error: {describe(error)}", sys.stderr), fg="red", err=True)

    # ---- What is shown -----------------------------------------------------------------------------------------------

    def _banner(self) -> None:
        """Three lines, unless something is unusual; the rest is in /stats."""
        llm, models = self._llm, self._options.models
        kind = ", the demo model" if models.is_demo else f" ({quantisation(llm.loaded.native)})"
        note(f"model: {shown_name(Path(llm.model_path))}{kind}; context of {llm.n_ctx()} tokens")
        if llm.drafter is None:
            note(f"drafts: none ({llm.drafter_reason})")
        elif not llm.can_speculate:
            note("drafts: none, because this model's memory cannot be rolled back")
        else:
            note(f"drafts: {' and '.join(map(str, llm.resolved.drafters))}; gate: {self._gate_in_short()}")
        if not models.formats_chats(llm):
            warn(NO_TEMPLATE)
        if self._show_drafts:
            click.echo(legend(self._colour), err=True, color=self._colour or None)
        if self.interactive:
            note("/help: commands, /stats: details; Ctrl-C stops an answer, Ctrl-D leaves")

    def _gate_in_short(self) -> str:
        gate, window = self._llm.gate, self._llm.window
        if gate.is_lossless:
            return f"{gate} ({'probabilities' if gate.draws else 'answers'} stay the same)"
        shown = window if window.size > 0 else "none"
        return f"{gate}, window: {shown} (lossy: answers may differ; /gate exact turns it off)"

    def _show_machine(self) -> None:
        llm, models = self._llm, self._options.models
        given = models.arguments["n_threads"]
        threads = counted(llm.n_threads if given == AUTO else given, "thread")
        if given == AUTO and llm.n_threads > 1:
            threads += ", fewer if others need the cores"
        note(f"pyfly-cpp {__version__}, on {models.where()}, {threads}")

    def _show_drafter(self) -> None:
        llm = self._llm
        if llm.drafter is None:
            note(f"no drafter ({llm.drafter_reason}): plain decoding")
        elif not llm.can_speculate:
            note("this model's memory cannot be rolled back: plain decoding, without speculation")
        else:
            names = " and ".join(str(drafter) for drafter in llm.resolved.drafters)
            when = ", used when that is faster" if llm.adaptive else ""
            note(f"drafter: {names}{when} ({llm.drafter_reason})")

    def _show_gate(self) -> None:
        gate = self._llm.gate
        if gate.is_lossless:
            same = "have the same probabilities" if gate.draws else "are the same"
            note(f"gate: {gate}. Only drafts that the model agrees with are kept: answers {same} as without drafts.")
            return
        window = self._llm.window
        note(f"gate: {gate}, window: {window if window.size > 0 else 'none'}")
        note("This is lossy: answers may differ from plain decoding. --gate exact or /gate exact turns it off.")
        if self._llm.adaptive:
            note(
                "With the governor, as here, no loose gate was clearly faster than exact in our measurements; "
                "`pyfly-cpp bench` compares them on your machine."
            )

    def _context(self) -> str:
        n, n_ctx = self._llm.n_tokens, self._llm.n_ctx()
        return f"context: {n} of {n_ctx} tokens used, {n_ctx - n} left"

    # ---- Answers -----------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """A message of the user, behind what was read for it."""
        if self._answer(self._conversation, f"{self._read}\n{text}" if self._read else text):
            self._read = ""
        else:
            kept = "; what was read goes before the next one" if self._read else ""
            note(f"(stopped before the first word; your message was forgotten{kept})")

    def _answer(self, before: Conversation, text: str) -> bool:
        """One turn. It becomes the conversation's last when it is over, with the text written before an interrupt; a
        turn that failed, or was stopped before its first word, leaves no trace. Returns whether it was had."""
        turn = Conversation(before.system, [*before.messages])
        turn.say("user", text)
        self._make_room(turn)
        llm, messages = self._llm, turn.prompt()
        answer = self._stream(lambda request: llm.write_chat(messages, **request), lambda: hear_chat(llm, messages))
        if answer is None:
            return False
        turn.say("assistant", answer)
        self._conversation = turn
        return True

    def _continue(self) -> None:
        """Resumes the answer that was cut off."""
        if self._cut is None:
            has_answer = any(message["role"] == "assistant" for message in self._conversation.messages)
            why = "the last one came to its end" if has_answer else "write a message first"
            raise ValueError(f"there is no answer to continue; {why}.")
        cut = self._cut
        more = self._stream(lambda request: self._llm.write(**cut, **request), lambda: cut)
        self._conversation.messages[-1]["content"] += more or ""

    def _stream(
        self,
        write_pieces: Callable[[dict[str, Any]], Generator[Piece, None, None]],
        hear_completion: Callable[[], dict[str, Any]],
    ) -> str | None:
        """Writes an answer as it comes, and how it came; returns it, or None if it was stopped before its first
        word. `hear_completion`: the completion that it is, as arguments of `create_completion`."""
        llm = self._llm
        before_stats = llm.stats
        said = list[Token]()
        written, watch = AnswerWriter(), LoopWatch()
        is_stopped, finish = False, None
        try:
            pieces = write_pieces(self._options.request())
            with reading(llm) as bar, contextlib.closing(pieces), unseen_typing():
                for piece in pieces:
                    bar.stop()
                    finish = piece.finish
                    said += piece.tokens
                    if self._show_drafts:
                        write_marked(marked(llm, piece, self._colour))
                    else:
                        written.write(piece.text)
                    is_loop = [watch.add(token.id) for token in piece.tokens]
                    if self.interactive and any(is_loop):
                        break
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            is_stopped = True
        except BaseException:
            if said:
                write("\n")
            raise
        write("\n")
        is_cut = finish in (None, "length")
        if is_stopped and not said:
            return None
        self._cut = None
        if is_cut:
            said = whole_characters(said, llm.vocabulary.piece)
            asked = hear_completion()
            self._cut = {name: asked.get(name) for name in ("stop", "stopping_criteria")}
            self._cut["prompt"] = [*asked["prompt"], *(token.id for token in said)]
        loop = watch.loop
        notes = [llm.stats.since(before_stats).summary(), self._context()]
        if loop is not None and is_cut:
            notes.insert(0, f"the model repeats the same {counted(loop.period, 'token')} again and again: try /set "
                            "temperature or /set repeat-penalty 1.1, or /regenerate")  # fmt: skip
        if is_stopped or finish is None:
            notes.insert(0, "stopped; /continue resumes")
        elif finish == "length":
            notes.insert(
                0, "cut off: the context is full" if is_full(llm) else "cut off by --max-tokens; /continue resumes"
            )
        note(f"({'; '.join(notes)})")
        return "".join(token.text for token in said)

    def _make_room(self, turn: Conversation) -> None:
        """Forgets the oldest turns if the conversation has outgrown the context, and reports that."""
        llm = self._llm
        n_ctx = llm.n_ctx()

        def count(text: str) -> int:
            return len(llm.tokenize(text.encode("utf-8"), add_bos=False))

        wanted = self._options.sampling["max_tokens"] or n_ctx
        n_room = n_ctx - min(wanted, n_ctx // 4)
        message = turn.messages[-1]["content"]
        if count(message) + 8 >= n_ctx:
            remedy = "/undo what was read" if self._read else "shorten it"
            raise ValueError(
                f"the message has {count(message)} tokens and the context holds "
                f"{self._options.models.room(llm)}; {remedy}, or raise --n-ctx."
            )
        n_turns = turn.shorten(n_room, count)
        if n_turns:
            turns = "the oldest turn was" if n_turns == 1 else f"the {n_turns} oldest turns were"
            warn(
                f"The conversation has outgrown the context of {n_ctx} tokens: {turns} forgotten. /reset starts over, "
                "--n-ctx gives more room."
            )

    # ---- Commands ----------------------------------------------------------------------------------------------------

    def _run_command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if name in ("/help", "/?"):
            formatter = Formatter(width=min(100, shutil.get_terminal_size().columns))
            formatter.write_dl([*HELP.items()])
            formatter.write_text(_KEYS)
            click.echo(formatter.getvalue(), nl=False, err=True)
        elif name == "/regenerate":
            before, message = self._conversation.without_last_turn()
            if self._options.sampling["temperature"] == 0 or self._options.sampling["seed"] is not None:
                note("(with temperature 0, or a seed, it is likely to be the same one; /set changes that)")
            if not self._answer(before, message):
                note("(stopped before the first word; the conversation is as before)")
        elif name == "/continue":
            self._continue()
        elif name == "/undo" and self._read:
            self._read = ""
            note("(forgotten: what was read for the next message)")
        elif name == "/undo":
            self._cut = None
            self._conversation, message = self._conversation.without_last_turn()
            note(f"(forgotten: {message if len(message) <= 60 else message[:57] + '...'!r} and its answer)")
        elif name == "/read":
            self._read_file(file_named(name, rest))
        elif name == "/system":
            if rest:
                self._conversation.system = None if rest in ('""', "''") else rest
            note(f"(system prompt: {self._conversation.system or 'none'})")
        elif name == "/set":
            options, what = self._options.changed(rest)
            if options is not self._options:
                self._decode_as(options)
            note(f"({what})")
        elif name in ("/reset", "/clear"):
            self._conversation.messages, self._read, self._cut = [], "", None
            note("(the conversation was forgotten)")
        elif name == "/stats":
            self._show_stats()
        elif name == "/gate":
            if rest:
                self._decode_as(replace(self._options, gate=parse_gate(rest)))
            self._show_gate()
        elif name == "/preset":
            self._take_preset(rest)
        elif name == "/drafter":
            if rest:
                self._draft_with(rest)
            self._show_drafter()
        elif name == "/save":
            path = file_named(name, rest)
            settings = {"model": shown_name(Path(self._llm.model_path)), **self._options.saved()}
            conversations.save(path, self._conversation, settings)
            note(f"(saved {counted(len(self._conversation.messages), 'message')} in {path})")
        elif name == "/load":
            self._load(file_named(name, rest))
        else:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"Did you mean {near[0]}?" if near else "/help lists the commands."
            raise ValueError(f"there is no command {name!r}. {hint} (To begin a message with a slash, write //.)")

    def _take_preset(self, name: str) -> None:
        if not name:
            raise ValueError(f"write /preset NAME; the presets are {', '.join(SHIPPED)}.")
        preset = load_preset(name)
        if not preset.leaves_drafter:
            raise ValueError(f"the preset {name} names a drafter; start with --preset {name}.")
        models = replace(self._options.models, preset=preset)
        self._decode_as(replace(self._options, models=models, gate=None, window=None))
        self._show_gate()

    def _draft_with(self, word: str) -> None:
        """The drafter that --drafter would name; the old one stays if this fails."""
        models = replace(self._options.models, drafter=DRAFTER.convert(word, None, None), draft=None)
        resolved = Resolved(reason="/drafter none")
        if models.drafter != "none":
            resolved = models.choose_drafters()  # options that it has no use for wait for the next one
        self._options.decoding.require_distributions(resolved.drafters)
        self._llm.drafter = resolved
        self._options = replace(self._options, models=models)

    def _decode_as(self, options: Options) -> None:
        options.decoding.require_distributions(self._llm.resolved.drafters)
        self._llm.decoding = options.decoding
        self._options = options

    def _read_file(self, path: Path) -> None:
        n_ctx = self._llm.n_ctx()
        text = file_text(path, _MOST_BYTES * n_ctx).rstrip("\n")
        n, n_before = (len(self._llm.tokenize(one.encode("utf-8"), add_bos=False)) for one in (text, self._read))
        if n_before + n + 8 >= n_ctx:
            before, undo = (f" besides the {n_before} you read before", ", /undo those") if n_before else ("", "")
            raise ValueError(
                f"{str(path)!r} has {n} tokens{before}, but the context holds {n_ctx}; use part of it{undo}, or "
                "raise --n-ctx."
            )
        self._read = f"{self._read}\n{text}" if self._read else text
        note(f"({counted(n, 'token')} of {path} go before your next message; /undo forgets them)")

    def _show_stats(self) -> None:
        stats = self._llm.stats
        self._show_machine()
        self._show_drafter()
        self._show_gate()
        note(f"sampling: {self._options.changed('')[1]}")
        n_turns = sum(message["role"] == "assistant" for message in self._conversation.messages)
        note(f"{counted(n_turns, 'answer')} in this conversation; {self._context()}")
        note(f"since the start: {stats.summary()}")
        if stats.rounds:
            note(
                f"drafts rejected: {stats.rejected_gate} by the gate, {stats.rejected_window} by its window, "
                f"{stats.rejected_boundary} because a step ended before its window, {stats.rejected_safety} protected "
                f"tokens; tokens taken back: {stats.rolled_back}"
            )
            note(
                f"seconds: prompt {stats.seconds_prefill:.2f}, draft {stats.seconds_draft:.2f}, verify "
                f"{stats.seconds_verify:.2f}, gate {stats.seconds_gate:.2f}"
            )

    def _load(self, path: Path) -> None:
        """Everything is read and checked before anything is changed."""
        conversation, settings = conversations.load(path)
        self._decode_as(self._options.restored(path, settings))
        self._conversation, self._cut = conversation, None
        note(f"(loaded {counted(len(conversation.messages), 'message')} from {path})")
        model = settings.get("model")
        own = shown_name(Path(self._llm.model_path))
        if isinstance(model, str) and model != own:
            warn(f"The conversation was saved with {model}; {own} continues it.")
        self._show_gate()
