"""The most that loose acceptance can gain, and the steps that a loose token saves: an oracle decides by the answers.

    python benchmarks/oracle.py --model TARGET --draft DRAFT --data FOLDER --out FILE.jsonl
        [--drafter WORD] [--part gsm8k] [--limit 30] [--k 8] [--steps 0] [--parallel 4] [--rejoin 24] [--every 8]
        [--horizon 64] [--threads N] [--minutes M] [--record FILE.json.gz]

The bound. Each item that exact decoding answers right is decoded greedily with K drafts in each step, once exactly and
once with an oracle for a gate. The oracle walks through the answer. Where a draft is not the target's choice, it keeps
the draft in a copy of the answer so far, lets the target finish that copy greedily, and has the task grade it. If it is
right, the draft is kept and the finished copy is what the target will choose from there on; the rest of the step's
draft is then compared with that. Else the step ends with the target's choice, as exact decoding would have it. So each
answer of the oracle is right, and no other gate that decides token by token and never gives up a right answer keeps the
first wrong draft where this one does not. (It is greedy: a token that it keeps may lead to fewer steps saved later on
than another would.) A copy whose last --rejoin tokens are also in the answer at hand, behind the place, is taken to go
on as that does, which saves finishing most copies; 0 finishes them all. Control tokens are never kept, and no window
follows. The gain is the steps of exact decoding over those of the oracle, of all items together; also printed are the
tokens per step, because an oracle's answers may be shorter or longer. With --steps the oracle stops after so many
steps of each answer, and exact decoding counts up to the same number of tokens: most of the time goes into finishing
copies. Items that exact decoding gets wrong are left out: whatever is kept there costs nothing.

m. For every --every-th token that the oracle keeps, exact decoding continues in both ways, with the token and without
it, for up to --horizon tokens. m is by how many steps the way with it is ahead at the same number of tokens, the last
step counted in proportion. With L loose tokens in a token and tau tokens per step of exact decoding, 1 / tau_loose is
1 / tau - m L, so the gain is 1 / (1 - m L tau) (docs/design/loose.md).

Counts alone, no clock, so the machine need not be idle. Several items run at a time, each in a thread that waits for
its requests. It can be killed at any moment; the same command resumes with the items that are not in --out yet.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import add_record, markdown, print_machine, record
from study import PARTS, digest, read_items

from pyfly_cpp import FlyBatch
from pyfly_cpp.decoding import EXACT, Decoding
from pyfly_cpp.decoding.gates import Margin
from pyfly_cpp.decoding.resolve import resolve
from pyfly_cpp.engine.stats import Record
from pyfly_cpp.errors import PyflyError
from pyfly_cpp.machine.conditions import describe_model
from pyfly_cpp.machine.rows import DataError, Row
from pyfly_cpp.measure.generator import Prompt, request_for
from pyfly_cpp.measure.journal import Lines
from pyfly_cpp.measure.parallel import ParallelGenerator
from pyfly_cpp.measure.report import interval
from pyfly_cpp.measure.statistics import bootstrap, ratio, ratio_of_ratios
from pyfly_cpp.measure.tasks.task import Item, Task
from pyfly_cpp.models.named import resolve_model

MEASURES = Decoding(gate=Margin(1e-6))
"""Exact decoding that also measures by how much a draft misses."""
MARGINS = (0.3, 1.0, 3.0)
"""Nats, by which the report groups mismatches."""
FEWEST = 8
"""Tokens on both ways that m needs."""


def steps_to(records: Sequence[Record], n: int) -> float:
    """The steps that it took to commit the first n tokens, the last one in proportion."""
    steps = 0.0
    for _, made in groupby(records, key=lambda one: one.round):
        size = len(list(made))
        steps += min(size, n) / size
        n -= min(size, n)
        if n == 0:
            break
    return steps


class Target:
    """Greedy exact decoding of many threads on one batch. `most`: tokens of an answer."""

    def __init__(self, batch: FlyBatch, k: int, most: int) -> None:
        self.batch, self.k, self.most = batch, k, most
        self.protected = batch.model.decoder.target.protected

    def continued(self, tokens: Sequence[int], prompt: Prompt, n: int, setting: Decoding) -> list[Record]:
        """How exact decoding continues, up to n tokens, an end-of-text token included."""
        return self._read(tokens, prompt, n, setting, lambda _: False)

    def _read(
        self, tokens: Sequence[int], prompt: Prompt, n: int, setting: Decoding, ends: Callable[[list[Record]], bool]
    ) -> list[Record]:
        """The same, until `ends` is true, which is shown each beginning of the records: a reader may be late."""
        request = request_for(self.batch.llama, Prompt(tuple(tokens), prompt.stop), n, 0.0)
        handle = self.batch.write(request, decoding=setting, trace=True)
        n_shown = 0
        for _ in handle:
            made = request.records[:]
            for n in range(n_shown + 1, len(made) + 1):
                if ends(made[:n]):
                    handle.cancel()
                    return made[:n]
            n_shown = len(made)
        return request.records

    def finished(self, tokens: list[int], prompt: Prompt, n: int, rest: Sequence[int], rejoin: int) -> list[int]:
        """Tokens and how the target continues them, up to n tokens; `rest`: an answer whose end is taken once `rejoin`
        > 0 tokens of both are the same."""
        joined = 0

        def joins(seen: list[Record]) -> bool:
            nonlocal joined
            last = [one.token for one in seen[-rejoin:]]
            ends = range(len(rest), rejoin - 1, -1) if rejoin and len(seen) >= rejoin else ()
            joined = next((end for end in ends if list(rest[end - rejoin : end]) == last), 0)
            return joined > 0

        setting = replace(EXACT, draft_max=1)  # in a batch, longer drafts would cost more than they save
        seen = self._read(tokens, prompt, n, setting, joins)
        made = [one.token for one in seen]
        return [*tokens, *(made + list(rest[joined:]) if joined else made)[:n]]

    def drafted(self, tokens: Sequence[int], prompt: Prompt, n: int) -> tuple[list[int], float | None]:
        """The draft for a step behind these tokens, of at most n >= 1 tokens with what the target adds, and by how many
        nats its first mismatch misses the target's choice (None without one)."""
        if n == 1:
            return [], None
        setting = replace(MEASURES, draft_max=self.k)
        few = min(n, self.k + 2)  # the step, and one token of the next, also if it is cancelled late
        seen = self._read(tokens, prompt, few, setting, lambda seen: seen[-1].round > seen[0].round)
        step = [one for one in seen if one.round == seen[0].round]
        if step[0].position != len(tokens):
            raise RuntimeError(f"the first step has position {step[0].position}, not {len(tokens)}")
        draft = [one.token for one in step if one.depth > 0]
        return [*draft, *step[-1].rejected], step[-1].margin if step[-1].rejected else None


class Walk:
    """One item."""

    def __init__(
        self,
        target: Target,
        task: Task,
        item: Item,
        prompt: Prompt,
        every: int,
        horizon: int,
        rejoin: int,
        most_steps: int = 0,
    ) -> None:
        """`most_steps`: of the oracle; 0: all."""
        self.target, self.task, self.item, self.prompt = target, task, item, prompt
        self.every, self.horizon, self.rejoin, self.most_steps = every, horizon, rejoin, most_steps
        self.n_prompt = len(prompt.tokens)
        self.end = self.n_prompt + target.most
        self.mismatches: list[Row] = []

    def is_right(self, tokens: Sequence[int]) -> bool:
        """Whether the answer in these tokens, prompt and answer, is right."""
        answer = list(tokens[self.n_prompt :])
        text = self.target.batch.detokenize(answer).decode("utf-8", errors="ignore")
        for stop in self.prompt.stop:
            text = text.partition(stop)[0]
        return self.task.score(self.item, text, answer).correct

    def run(self, keeps: Callable[[Sequence[int]], bool] | None = None) -> Row:
        """The line of the item. `keeps`: in place of the grader, whether a finished copy is right."""
        keeps = keeps or self.is_right
        prompt, target = self.prompt, self.target
        exact = target.continued(prompt.tokens, prompt, target.most, replace(EXACT, draft_max=target.k))
        text = [*prompt.tokens, *(one.token for one in exact)]
        line = {"item": self.item.id, "group": self.item.unit, "right": self.is_right(text)}
        if line["right"]:
            found = self.oracle(text, keeps)
            n = min(len(exact), found["oracle_tokens"]) if self.most_steps else len(exact)
            line |= {"tokens": n, "steps": steps_to(exact, n), **found, "mismatches": self.mismatches}
        return line

    def oracle(self, text: list[int], keeps: Callable[[Sequence[int]], bool]) -> Row:
        """Tokens and steps of the oracle. `text`: prompt and exact answer."""
        at, n_steps, n_kept = self.n_prompt, 0, 0
        while at < len(text) and n_steps < (self.most_steps or len(text)):
            draft, margin = self.target.drafted(text[:at], self.prompt, min(self.target.k + 1, self.end - at))
            n_steps += 1
            for i, token in enumerate(draft):
                if at == len(text):
                    break
                if token != text[at]:
                    found = self.kept(text, at, token, keeps)
                    self.mismatches.append({"at": at - self.n_prompt, "margin": margin, "kept": found is not None})
                    if found is None:
                        break
                    n_kept += 1
                    if n_kept % self.every == 0:
                        self.mismatches[-1]["m"] = self.saved(text, found, at, draft[i + 1 :])
                    text, margin = found, None  # of a later one of the step it is not known
                at += 1
            at += at < len(text)
        return {"oracle_tokens": at - self.n_prompt, "oracle_steps": n_steps, "kept": n_kept}

    def kept(self, text: list[int], at: int, token: int, keeps: Callable[[Sequence[int]], bool]) -> list[int] | None:
        """Prompt and answer with another token at a place, as the target finishes it; None if that is not right."""
        if {token, text[at]} & self.target.protected:
            return None
        copy = [*text[:at], token]
        if len(copy) < self.end:
            rest = text[at + 1 :]
            copy = self.target.finished(copy, self.prompt, self.end - len(copy), rest, self.rejoin)
        return copy if keeps(copy) else None

    def saved(self, text: list[int], found: list[int], at: int, rest: Sequence[int]) -> float | None:
        """m of the token that `found` has at a place and `text` has not. `rest`: the step's draft behind it."""
        run = next((i for i, token in enumerate(rest) if found[at + 1 + i : at + 2 + i] != [token]), len(rest))
        ahead = min(run + 1, len(found) - at - 1)  # with what the target adds
        setting = replace(EXACT, draft_max=self.target.k)
        n = min(self.horizon, self.end - at - 1)
        if n - ahead < 1:
            return None
        without = self.target.continued(text[: at + 1], self.prompt, n, setting)
        begun = found[: at + 1 + ahead]
        behind = self.target.continued(begun, self.prompt, n - ahead, setting) if len(begun) < len(found) else []
        n = min(len(without), ahead + len(behind))
        return steps_to(without, n) - steps_to(behind, n - ahead) if n >= max(FEWEST, ahead) else None


# ---- Report ----------------------------------------------------------------------------------------------------------


def mean_of(values: Sequence[tuple[str, float]]) -> str:
    """The mean of numbers with their items, with an interval."""
    table = [[value, 1.0] for _, value in values]
    return interval(bootstrap(table, ratio, [item for item, _ in values])) if values else ""


def report(lines: Sequence[Row]) -> str:
    """The tables."""
    right = [line for line in lines if line["right"]]
    if not right:
        return "Exact decoding has answered no item right yet."
    groups = [line["group"] for line in right]

    def column(*names: str) -> Any:
        return [[line[name] for name in names] for line in right]

    tau = ("tokens", "steps")
    tau_oracle = ("oracle_tokens", "oracle_steps")
    rows = [
        ["steps, exact over oracle", interval(bootstrap(column("steps", "oracle_steps"), ratio, groups))],
        ["tokens per step, oracle over exact", interval(bootstrap(column(*tau_oracle, *tau), ratio_of_ratios, groups))],
        ["tokens per step, exact", interval(bootstrap(column(*tau), ratio, groups))],
        ["tokens per step, oracle", interval(bootstrap(column(*tau_oracle), ratio, groups))],
        ["L: kept, of the oracle's tokens", interval(bootstrap(column("kept", "oracle_tokens"), ratio, groups))],
        ["m by the tokens per step", interval(bootstrap(column(*tau, *tau_oracle, "kept"), m_of_sums, groups))],
        ["tokens of an answer, exact and oracle", " and ".join(str(median(line[n] for line in right)) for n in
                                                              ("tokens", "oracle_tokens"))],
    ]  # fmt: skip
    out = [f"{len(right)} items that exact decoding answers right, of {len(lines)}.\n", markdown(["", ""], rows)]
    found = [(line["item"], one) for line in right for one in line["mismatches"]]
    rows = []
    for name, low, high in zip(
        [f"up to {MARGINS[0]}", *(f"to {high}" for high in MARGINS[1:]), "above", "not known", "all"],
        [0.0, *MARGINS, np.nan, 0.0], [*MARGINS, np.inf, np.nan, np.inf],
    ):  # fmt: skip
        some = [
            (item, one) for item, one in found
            if name == "all" or (one["margin"] is None if np.isnan(low) else
                                 one["margin"] is not None and low < one["margin"] <= high)
        ]  # fmt: skip
        saved = [(item, one["m"]) for item, one in some if one.get("m") is not None]
        kept = mean_of([(item, float(one["kept"])) for item, one in some])
        rows.append([name, str(len(some)), kept, str(len(saved)), mean_of(saved)])
    out.append("\n" + markdown(["margin, nats", "mismatches", "of them kept", "m measured", "m"], rows))
    return "\n".join(out)


def m_of_sums(sums: Any) -> Any:
    """m from sums of tokens and steps of exact decoding, of the oracle, and of what it kept: m L = 1 / tau - 1 / tau of
    the oracle, with L per token of the oracle."""
    tokens, steps, oracle_tokens, oracle_steps, kept = np.moveaxis(np.asarray(sums), -1, 0)
    return (steps / tokens - oracle_steps / oracle_tokens) / (kept / oracle_tokens)


# ---- Recording -------------------------------------------------------------------------------------------------------


def conditions(args: argparse.Namespace) -> Row:
    """What must be equal for items to stand in one table."""
    names = ("part", "k", "steps", "max_tokens", "every", "horizon", "rejoin")
    models = {name: describe_model(path) for name in ("model", "draft") if (path := getattr(args, name)) is not None}
    return {**{name: getattr(args, name) for name in names}, "drafter": args.drafter.partition(":")[0], **models}


def open_lines(path: Path, wanted: Row) -> Lines:
    """The file of the items, whose first line has the conditions. Raises DataError for others."""
    lines = Lines(path)
    if not lines.rows:
        lines.append(wanted)
        lines = Lines(path)
    if lines.rows[0] != wanted:
        differ = ", ".join(name for name in {*wanted, *lines.rows[0]} if wanted.get(name) != lines.rows[0].get(name))
        raise DataError(f"{path} was recorded under other conditions ({differ}); choose another --out.")
    return lines


def record_items(args: argparse.Namespace, items: Sequence[Item], lines: Lines) -> None:
    """Walks through the items that are not there yet, several at a time."""
    task = PARTS[args.part][0]
    threads = {} if args.threads is None else {"n_threads": args.threads, "n_threads_batch": args.threads}
    drafters = resolve(args.model, args.drafter, args.draft)
    print(f"drafts: {drafters.drafter}", file=sys.stderr)
    ends = time.monotonic() + 60 * args.minutes
    adding = threading.Lock()
    with FlyBatch(
        args.model, args.parallel, n_ctx=args.ctx, drafter=drafters.drafter, adaptive=False, verbose=False, **threads
    ) as batch:
        target, generator = Target(batch, args.k, args.max_tokens), ParallelGenerator(batch, drafters)

        def walk(item: Item) -> None:
            if time.monotonic() > ends:
                return
            prompt = generator.render(task.messages(item), task.prefix(item), task.stop(item))
            line = Walk(target, task, item, prompt, args.every, args.horizon, args.rejoin, args.steps).run()
            with adding:
                lines.append(line)
            print({name: value for name, value in line.items() if name != "mismatches"}, file=sys.stderr, flush=True)

        with ThreadPoolExecutor(args.parallel) as pool:
            for _ in pool.map(walk, items):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF of the target")
    parser.add_argument("--draft", help="GGUF of the draft, or of a head")
    parser.add_argument("--drafter", default="auto", help="the drafter's word, as on the command line (default auto)")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data files, as of study.py")
    parser.add_argument("--out", type=Path, required=True, help="the file of the items, which resumes")
    parser.add_argument("--part", choices=("gsm8k", "commonsenseqa"), default="gsm8k")
    parser.add_argument("--limit", type=int, default=30, help="items (default 30)")
    parser.add_argument("--k", type=int, default=8, help="tokens drafted in a step (default 8)")
    parser.add_argument("--steps", type=int, default=0, help="steps of the oracle in each answer (default 0, all)")
    parser.add_argument("--parallel", type=int, default=4, help="items at a time (default 4)")
    parser.add_argument(
        "--rejoin", type=int, default=24, help="tokens after which a copy is as the answer (default 24)"
    )
    parser.add_argument("--every", type=int, default=8, help="m is measured at every so-many-th kept token (default 8)")
    parser.add_argument("--horizon", type=int, default=64, help="tokens both ways continue for m (default 64)")
    parser.add_argument("--max-tokens", type=int, default=400, help="of an answer (default 400)")
    parser.add_argument("--ctx", type=int, default=1024, help="tokens of one request, at most (default 1024)")
    parser.add_argument("--threads", type=int, help="threads (default: as shipped)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no item after so many")
    add_record(parser)
    args = parser.parse_args()
    try:
        args.model, args.draft = (path and resolve_model(path) for path in (args.model, args.draft))
        items = read_items(args.part, args.data, {args.part: (0, args.limit)})
        machine = print_machine()
        wanted = conditions(args)
        done = {line["item"] for line in open_lines(args.out, wanted).rows[1:]}
        missing = [item for item in items if item.id not in done]
        if missing:
            record_items(args, missing, open_lines(args.out, wanted))
        lines = sorted(open_lines(args.out, wanted).rows[1:], key=lambda line: digest(line["item"]))
        print(report(lines))
        record(args.record, machine, {"conditions": wanted, "items": lines})
    except (PyflyError, ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit("Interrupted. Run the same command to resume.") from None


if __name__ == "__main__":
    main()
