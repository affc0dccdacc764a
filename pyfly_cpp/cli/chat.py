"""`pyfly-cpp chat`: answers on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from dataclasses import replace
from pathlib import Path

import click

from pyfly_cpp import __version__
from pyfly_cpp.cli import conversation as conversations
from pyfly_cpp.cli import describe
from pyfly_cpp.cli.conversation import Conversation
from pyfly_cpp.cli.drafts import legend, marked, use_colour
from pyfly_cpp.cli.headings import HeadedCommand
from pyfly_cpp.cli.loading import reading
from pyfly_cpp.cli.options import Options, shared_options
from pyfly_cpp.cli.reader import COMMANDS, Reader, make_reader
from pyfly_cpp.cli.terminal import Answer, folded, note, shown, unseen_typing, warn, write, write_marked
from pyfly_cpp.cli.text import TEXT, file_named, file_text
from pyfly_cpp.decoding.drafters import require_drafters
from pyfly_cpp.decoding.gates import examples, parse_gate
from pyfly_cpp.errors import counted
from pyfly_cpp.llama.fly_llama import FlyLlama

_MOST_BYTES = 64
"""Of a token, on average: a longer file does not fit in the context, however it is read."""

HELP = f"""\
/help               this list
/regenerate         answer the last message once more
/undo               forget the last message and its answer
/read FILE          put the text of a file before the next message
/system [TEXT]      show or set the system prompt; "" for none
/set [NAME VALUE]   show or change temperature, seed, max-tokens, top-p, ...
/gate [GATE]        show or set the gate; exact and stochastic are lossless
/stats              counters since the start
/reset              forget the conversation
/save FILE          save the conversation and the settings
/load FILE          go on with a saved one
/exit               leave (so does Ctrl-D)
Gates: {examples(combined=False)}.
Several lines: Alt-Enter (or Esc, Enter) starts a new line, so does a backslash
at the end of one. Ctrl-C stops an answer. A message that begins with a slash:
write //."""


@click.command(
    "chat",
    cls=HeadedCommand,
    short_help="Talk to a model.",
    epilog="Example: pyfly-cpp chat -m target.gguf -d draft.gguf --system 'Be brief.'",
)
@click.option("--system", type=TEXT, metavar="TEXT", help="System prompt.")
@click.option("--show-drafts", is_flag=True, help="Mark how each token was produced, and what was rejected.")
@shared_options
def command(options: Options, system: str | None, show_drafts: bool) -> None:
    """Talk to a model. /help lists the commands inside; piped input is read as one message a line.

    Answers are those of plain decoding unless you accept others: --preset balanced, --preset fast, or --gate.
    """
    llm, reason = options.load(FlyLlama, trace=show_drafts)
    llm.drafter_reason = reason
    try:
        chat = Chat(llm, options, Conversation(system), make_reader(), show_drafts)
        n_failed = chat.run()
    finally:
        llm.close()
    if n_failed and not chat.interactive:
        sys.exit(1)


class Chat:
    """The loop, and what it remembers."""

    def __init__(
        self, llm: FlyLlama, options: Options, conversation: Conversation, reader: Reader, show_drafts: bool
    ) -> None:
        self._llm = llm
        self._options = options
        self._conversation = conversation
        self._reader = reader
        self._show_drafts = show_drafts
        self._colour = use_colour()
        self._read = ""  # goes before the next message
        self.interactive = reader.interactive

    def run(self) -> int:
        """Talks until the user leaves; returns how many messages failed."""
        self._banner()
        n_failed = 0
        while True:
            try:
                text = self._reader.read().strip()
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
                if text == "/exit":
                    return n_failed
                if text.startswith("//"):
                    self._say(text[1:])
                elif text.startswith("/"):
                    self._run_command(text)
                elif text:
                    self._say(text)
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
        llm, options = self._llm, self._options
        reason = llm.drafter_reason
        title = f"pyfly-cpp {__version__}, {Path(llm.model_path).name}, context of {llm.n_ctx()} tokens"
        click.secho(shown(title, sys.stderr), bold=True, err=True)
        if llm.drafter is None:
            note(f"no drafter ({reason}): plain decoding")
        elif not llm.can_speculate:
            note("this model's memory cannot be rolled back: plain decoding, without speculation")
        else:
            names = " and ".join(str(drafter) for drafter in require_drafters(llm.drafter))
            how = "; it drafts only what pays" if llm.adaptive else ""
            note(f"drafter: {names} ({reason}{how})")
        self._show_gate()
        if "chat_format" not in options.models.arguments and "tokenizer.chat_template" not in llm.metadata:
            warn("this model has no chat template and may not be made for chat; --chat-format names one")
        if self._show_drafts:
            click.echo(legend(self._colour), err=True, color=self._colour or None)
        if self.interactive:
            note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")

    def _show_gate(self) -> None:
        gate = self._llm.gate
        if gate.is_lossless:
            note(f"gate: {gate}, " + ("as likely" if gate.draws else "the same") + " answers as plain decoding")
            return
        windows = gate.windows(self._llm.decoding.window)
        names = {"at once" if window.size == 0 else str(window) for window in windows}
        note(f"gate: {gate}, window: {names.pop() if len(names) == 1 else 'that of each region'}")
        note("This is lossy: answers may differ from plain decoding. --gate exact or /gate exact turns it off.")

    # ---- Answers -----------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """A message of the user, behind what was read for it."""
        if self._answer(self._conversation, f"{self._read}\n{text}" if self._read else text):
            self._read = ""

    def _answer(self, before: Conversation, text: str) -> bool:
        """One turn. It becomes the conversation's last when it is over, with what was said before an interrupt; a turn
        that failed, or was stopped before its first word, leaves no trace. Returns whether it was had."""
        llm = self._llm
        turn = Conversation(before.system, [*before.messages])
        turn.say("user", text)
        self._make_room(turn)
        before_stats = llm.stats
        said: list[str] = []
        written = Answer()
        interrupted, finish = False, None
        try:
            pieces = llm.write_chat(turn.prompt(), **self._options.request())
            with reading(llm) as bar, contextlib.closing(pieces), unseen_typing():
                for piece in pieces:
                    bar.stop()
                    finish = piece.finish
                    said.append(piece.text)
                    if self._show_drafts:
                        write_marked(marked(llm, piece, self._colour))
                    else:
                        written.write(piece.text)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            interrupted = True
        except BaseException:
            if said:
                write("\n")
            raise
        answer = "".join(said)
        if interrupted and not answer:
            write("\n")
            note("(stopped before the first word; your message was forgotten)")
            return False
        turn.say("assistant", answer)
        self._conversation = turn
        write("\n")
        notes = [llm.stats.since(before_stats).summary()]
        if interrupted:
            notes.insert(0, "stopped")
        elif finish == "length":
            full = llm.n_tokens + 2 >= llm.n_ctx()
            notes.insert(0, "cut off: the context is full" if full else "cut off by --max-tokens")
        note(f"({'; '.join(notes)})")
        return True

    def _make_room(self, turn: Conversation) -> None:
        """Forgets the oldest turns if the conversation has outgrown the context, and says so."""
        llm = self._llm
        n_ctx = llm.n_ctx()

        def count(text: str) -> int:
            return len(llm.tokenize(text.encode("utf-8"), add_bos=False))

        wanted = self._options.sampling["max_tokens"] or n_ctx
        n_room = n_ctx - min(wanted, n_ctx // 4)
        message = turn.messages[-1]["content"]
        if count(message) + 8 >= n_ctx:
            raise ValueError(
                f"the message has {count(message)} tokens and the context holds "
                f"{self._options.models.room(llm)}; shorten it, or raise --n-ctx."
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
        if name == "/help":
            click.echo(HELP, err=True)
        elif name == "/regenerate":
            before, message = self._conversation.without_last_turn()
            if self._options.sampling["temperature"] == 0 or self._options.sampling["seed"] is not None:
                note("(with temperature 0, or a seed, it is likely to be the same one; /set changes that)")
            self._answer(before, message)
        elif name == "/undo":
            self._conversation, message = self._conversation.without_last_turn()
            note(f"(forgotten: {message if len(message) <= 60 else message[:57] + '...'!r} and its answer)")
        elif name == "/read":
            self._read_file(file_named(name, rest))
        elif name == "/system":
            if rest:
                self._conversation.system = None if rest in ('""', "''") else rest
            note(f"(system prompt: {self._conversation.system or 'none'})")
        elif name == "/set":
            self._options, what = self._options.changed(rest)
            note(f"({what})")
        elif name == "/reset":
            self._conversation.messages, self._read = [], ""
            note("(the conversation was forgotten)")
        elif name == "/stats":
            self._show_stats()
        elif name == "/gate":
            if rest:
                self._decode_as(replace(self._options, gate=parse_gate(rest)))
            self._show_gate()
        elif name == "/save":
            path = file_named(name, rest)
            settings = {"model": Path(self._llm.model_path).name, **self._options.saved()}
            conversations.save(path, self._conversation, settings)
            note(f"(saved {counted(len(self._conversation.messages), 'message')} in {path})")
        elif name == "/load":
            self._load(file_named(name, rest))
        else:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"Did you mean {near[0]}?" if near else "/help lists the commands."
            raise ValueError(f"there is no command {name!r}. {hint} (To begin a message with a slash, write //.)")

    def _decode_as(self, options: Options) -> None:
        self._llm.decoding = options.decoding
        self._options = options

    def _read_file(self, path: Path) -> None:
        n_ctx = self._llm.n_ctx()
        text = file_text(path, _MOST_BYTES * n_ctx).rstrip("\n")
        n = len(self._llm.tokenize(text.encode("utf-8"), add_bos=False))
        if n + 8 >= n_ctx:
            raise ValueError(
                f"{str(path)!r} has {n} tokens and the context holds {n_ctx}; take a part, or raise --n-ctx."
            )
        self._read = f"{self._read}\n{text}" if self._read else text
        note(f"({counted(n, 'token')} of {path} go before your next message)")

    def _show_stats(self) -> None:
        stats = self._llm.stats
        n_turns = sum(message["role"] == "assistant" for message in self._conversation.messages)
        note(f"{counted(n_turns, 'answer')} in this conversation; since the start: {stats.summary()}")
        if stats.rounds:
            note(
                f"rejected by gate {stats.rejected_gate}, window {stats.rejected_window}, end of round "
                f"{stats.rejected_boundary}, safety {stats.rejected_safety}; rolled back {stats.rolled_back}"
            )
            if stats.loose_by_region:
                note(f"loose in {', '.join(f'{region} {n}' for region, n in stats.loose_by_region)}")
            note(
                f"seconds: prompt {stats.seconds_prefill:.2f}, draft {stats.seconds_draft:.2f}, verify "
                f"{stats.seconds_verify:.2f}, gate {stats.seconds_gate:.2f}"
            )

    def _load(self, path: Path) -> None:
        """Everything is read and checked before anything is changed."""
        conversation, settings = conversations.load(path)
        self._decode_as(self._options.restored(path, settings))
        self._conversation = conversation
        note(f"(loaded {counted(len(conversation.messages), 'message')} from {path})")
        model = settings.get("model")
        if isinstance(model, str) and model != Path(self._llm.model_path).name:
            warn(f"It was saved with {model}; it goes on with {Path(self._llm.model_path).name}.")
        self._show_gate()
