"""Texts that a head learns from: files of the user, or answers of the target."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, NamedTuple

from pyfly_cpp.engine.handle import Handle
from pyfly_cpp.errors import ContextFullError
from pyfly_cpp.llama.fly_batch import FlyBatch
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.llama.prompting import render_chat
from pyfly_cpp.machine.files import fingerprint, resumable
from pyfly_cpp.machine.rows import DataError, Row, Where, read_jsonl, read_lines_so_far

N_TEXT = 512
"""Most tokens of a text."""

N_ANSWER = 320
"""Most tokens of an answer."""

LEAST_ANSWER = 32
"""Tokens of an answer that is kept though it has no end."""

N_PARALLEL = 24
"""Answers that the target writes at the same time."""

Tell = Callable[[str, float], None]
"""Called with a name for the work and the share done, 0..1; an exception from it stops everything."""


class Text(NamedTuple):
    """A text as tokens."""

    kind: str
    """The prompt's kind, the row's `category`, or the ending of the file's name."""
    n_prompt: int
    """Number of tokens at the beginning that the target did not write."""
    tokens: list[int]
    prompt: str | None = None
    """What the target answers here; None: it is a text of the user's."""

    @classmethod
    def read(cls, path: Path) -> list[Text]:
        """The texts of a file that `append` has written; what a killed process left of its last line is cut off."""
        return [cls(**row) for row in _whole_lines(path)]

    def append(self, file: Any) -> None:
        """Appends the text to a file as a line."""
        file.write(json.dumps(self._asdict()) + "\n")
        file.flush()


def _whole_lines(path: Path) -> list[Row]:
    """The rows of a file of lines, none if there is no file; what a killed process left of the last one is cut off."""
    rows, length = read_lines_so_far(path)
    if path.exists():
        os.truncate(path, length)
    return rows


class FilesRead:
    """The files below a folder, or the one file, that texts were read of: noted in a file of lines, so that a later run
    notices that one of them has changed."""

    def __init__(self, note: Path, folder: Path) -> None:
        """Raises DataError if a file that was read is not as it was."""
        self._note, self._folder = note, folder if folder.is_dir() else folder.parent
        self._known = set()
        for row in _whole_lines(note):
            self._known.add(row["file"])
            if _print_of(path := self._folder / row["file"]) != row["content"]:
                raise DataError(
                    f"{path} is not as it was when the texts of {note.parent} were read; remove that folder, or choose "
                    "another output."
                )

    def add(self, path: Path) -> None:
        """Notes a file, once."""
        name = path.relative_to(self._folder).as_posix()
        if name not in self._known:
            self._known.add(name)
            with self._note.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"file": name, "content": _print_of(path)}) + "\n")


def _print_of(path: Path) -> str | None:
    try:
        return fingerprint(path)
    except OSError:  # gone, or not to be read
        return None


def texts_of_files(
    folder: Path, llm: FlyLlama, without: Path | None = None, note: Callable[[Path], None] = lambda path: None
) -> Iterator[Text]:
    """All files below a folder but those below `without`, or one file, in turn, as far as they are UTF-8: of JSON Lines
    with `prompt` and `answer` each row as a chat of the model `llm`, without those whose prompt leaves no room for an
    answer; of others pieces of at most `N_TEXT` tokens. A text's kind is the row's `category`, or the ending of the
    file's name. `note` is called with the file of each text first."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else [folder]
    left_out = without and without.resolve()
    paths = [path for path in paths if left_out not in path.resolve().parents]

    def texts_of(path: Path) -> Iterator[Text]:
        for text in _texts_of(path, llm):
            note(path)
            yield text

    for row in itertools.zip_longest(*map(texts_of, paths)):
        yield from (text for text in row if text is not None)


def _texts_of(path: Path, llm: FlyLlama) -> Iterator[Text]:
    ending = path.suffix[1:].encode("utf-8", "replace").decode() or "text"
    if path.suffix == ".jsonl":
        for number, row in read_jsonl(path):
            where = Where(str(path), number, row)
            message: Any = {"role": "user", "content": where.text("prompt")}
            prompt = render_chat(llm, [message]).tokens
            answer = llm.tokenize(where.text("answer").encode("utf-8"), add_bos=False)
            kind = str(row.get("category") or ending)
            if len(prompt) < N_TEXT:
                yield Text(kind, len(prompt), [*prompt, *answer, llm.token_eos()][:N_TEXT])
        return
    with contextlib.suppress(UnicodeDecodeError, OSError):  # no text
        for part in _parts(path):
            tokens = llm.tokenize(part.encode("utf-8"), add_bos=False)
            for i in range(0, len(tokens), N_TEXT):
                if len(piece := tokens[i : i + N_TEXT]) >= 2:
                    yield Text(ending, 0, piece)


_N_PART = 1 << 16
"""Most bytes of a part."""


def _parts(path: Path) -> Iterator[str]:
    """A file in parts that end with a line, or at least with a character: what is not asked for is not read, and no
    file is open in between."""
    begin = 0
    while True:
        with path.open("rb") as file:
            file.seek(begin)
            part = file.read(_N_PART)
        if len(part) == _N_PART:
            last = next(i for i in range(1, _N_PART + 1) if part[-i] & 0xC0 != 0x80 or i == _N_PART)
            part = part[: part.rfind(b"\n") + 1 or _N_PART - last or _N_PART]
        if not part:
            return
        yield part.decode("utf-8" if begin else "utf-8-sig").replace("\r\n", "\n")
        begin += len(part)


def in_turn(prompts: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    """Kind and prompt, each kind in turn."""
    for row in itertools.zip_longest(*([(kind, prompt) for prompt in of] for kind, of in prompts.items())):
        yield from (one for one in row if one is not None)


def answers(
    batch: FlyBatch,
    prompts: Iterator[tuple[str, dict[str, Any]]],
    running: dict[Future[Any], tuple[str, Handle]],
    goes_on: Callable[[], bool],
) -> Iterator[tuple[str, Handle]]:
    """Has prompts answered, many at a time, and yields each with its answer, in the order in which they end. Prompts
    without room for an answer are left out.

    Args:
        prompts: Each with the arguments of its request.
        running: Empty at first; holds the answers that have begun and not ended, also when it stops.
        goes_on: Called every second or more often; False, or an exception, stops everything.
    """
    while goes_on():
        for prompt, arguments in itertools.islice(prompts, 2 * N_PARALLEL - len(running)):
            handle = batch.submit([{"role": "user", "content": prompt}], **arguments)
            running[handle.feed.future] = prompt, handle
        if not running:
            return
        for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
            prompt, handle = running.pop(future)
            try:
                handle.result()
            except ContextFullError:  # a prompt that is too long
                continue
            yield prompt, handle


def write_answers(
    target: Path,
    prompts: Sequence[tuple[str, str]],
    path: Path,
    n_tokens: int,
    deadline: float,
    tell: Tell,
    **arguments: Any,
) -> None:
    """Lets the target answer, and appends prompts with answers to a file, in the order in which they end; what is begun
    when the time is over, as far as it is. Every second answer of a kind is drawn at temperature 0.7, the others are
    greedy.

    Args:
        prompts: Kind and prompt; those that the file has an answer to are left out, and those without room for one.
        n_tokens: It ends when the file has so many tokens.
        deadline: And at this time, of `time.monotonic`.
        **arguments: Of the target's `FlyBatch`.
    """
    written = Text.read(path)
    n, done = sum(len(text.tokens) for text in written), {text.prompt for text in written}
    kind_of = {prompt: kind for kind, prompt in reversed(prompts)}  # of a prompt that is there twice, the first
    waiting = (
        (prompt, {"max_tokens": N_ANSWER, "temperature": temperature})
        for prompt, temperature in _with_temperatures(prompts)
        if prompt not in done
    )
    running: dict[Future[Any], tuple[str, Handle]] = {}

    def goes_on() -> bool:
        tell("writing texts", min(n / n_tokens, 1.0))
        return n < n_tokens and time.monotonic() < deadline

    with resumable(path), path.open("a", encoding="utf-8") as file:
        with open_batch(target, **arguments) as batch:
            for prompt, handle in answers(batch, waiting, running, goes_on):
                n += _append(kind_of[prompt], prompt, handle, file)
        for prompt, handle in running.values():  # the batch is closed, so they grow no more
            if n < n_tokens and handle.steps and len(handle.steps[-1].request.tokens) >= LEAST_ANSWER:
                n += _append(kind_of[prompt], prompt, handle, file)


def open_batch(target: Path, **arguments: Any) -> FlyBatch:
    """A batch of `N_PARALLEL` requests of at most `N_TEXT` tokens."""
    return FlyBatch(target, N_PARALLEL, **{"n_ctx": N_TEXT, "verbose": False, **arguments})


def _with_temperatures(prompts: Sequence[tuple[str, str]]) -> Iterator[tuple[str, float]]:
    """Prompt and temperature, of kinds and prompts; each prompt once."""
    seen: set[str] = set()
    n_of_kind: Counter[str] = Counter()
    for kind, prompt in prompts:
        if prompt not in seen:
            yield prompt, 0.7 * (n_of_kind[kind] % 2)
            seen.add(prompt)
            n_of_kind[kind] += 1


def _append(kind: str, prompt: str, handle: Handle, file: Any) -> int:
    """A prompt with its answer so far, if a text has room for both; returns its tokens."""
    request = handle.steps[-1].request
    tokens = list(request.history[:N_TEXT])
    n_prompt = len(request.history) - len(request.tokens)
    if n_prompt >= len(tokens):
        return 0
    Text(kind, n_prompt, tokens, prompt).append(file)
    return len(tokens)
