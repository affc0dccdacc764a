"""The draft stage: a draft model alone, and one that verifies prompt lookup while it drafts.

    python benchmarks/levels.py --target MODEL --draft DRAFT [--prompts FILE.jsonl] [--k 8] [--tokens 160]

The target answers every prompt greedily. Then both drafters go through the answer: each drafts K tokens behind what is
there, and as many of them as are right, and one token more, are there for the next round, as in exact verification. The
two take turns of one round, so that what else the machine does slows both alike. What is compared is the time of the
draft stage alone, by the clock and by the processor (which other programs disturb less; with one thread it is the
time of the drafting itself). They catch up with the prompt before, untimed. What batches of the draft model cost
is measured first, as at any first use.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import defaultdict
from dataclasses import dataclass

from speed import print_machine

from pyfly_cpp import DraftModel, FlyLlama, MultiLevel, PromptLookup
from pyfly_cpp.bench.prompts import BUILT_IN, pick_prompts, read_prompts
from pyfly_cpp.evaluation.generation import Generator

NAMES = ("draft model", "multi-level")


@dataclass
class Total:
    """Of one drafter and one kind of prompt."""

    wall: float = 0.0
    processor: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    batches: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", default=BUILT_IN)
    parser.add_argument("--limit", type=int, help="Most prompts, evenly over their kinds.")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ctx", type=int, default=2048)
    given = parser.parse_args()
    print_machine()
    threads = {"n_threads": given.threads, "n_threads_batch": given.threads}
    drafters = (DraftModel(given.draft), MultiLevel(DraftModel(given.draft), PromptLookup()))
    llm = FlyLlama(given.target, n_ctx=given.ctx, verbose=False, **threads)
    host = llm._decoder._host(given.k)
    natives = [drafter.open(host) for drafter in drafters]
    llm._decoder.batch.configure([(native, given.k) for native in natives], adaptive=True)
    costs = llm._decoder.batch.measure()
    llm._decoder.batch.expect(costs)
    llm._decoder.batch.configure()
    print("a batch of the draft model:", ", ".join(f"{n} rows {us / 1000:.1f} ms" for _, n, us in costs.own))

    totals: dict[str, tuple[Total, Total]] = defaultdict(lambda: (Total(), Total()))
    for prompt in pick_prompts(read_prompts(given.prompts), given.limit):
        tokens = list(Generator(llm).render([{"role": "user", "content": prompt.turns[0]}]).tokens)
        if len(tokens) + given.tokens + given.k > given.ctx:
            continue
        stream = llm.generate(tokens, temp=0.0)
        answer = list(itertools.takewhile(lambda t: t != llm.token_eos(), itertools.islice(stream, given.tokens)))
        stream.close()
        begin = [(native.propose(tokens, 1), native.n_batches)[1] for native in natives]
        history, target = list(tokens), [*tokens, *answer]
        for turn in itertools.count():
            drafts: list[list[int]] = [[], []]
            for i in (turn % 2, 1 - turn % 2):
                total = totals[prompt.category][i]
                wall, processor = time.perf_counter(), time.process_time()
                drafts[i] = natives[i].propose(history, given.k)
                total.wall += time.perf_counter() - wall
                total.processor += time.process_time() - processor
                total.rounds += 1
                total.drafted += len(drafts[i])
            ahead = target[len(history) :]
            right = [
                sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(d, ahead))) for d in drafts
            ]
            for i, n in enumerate(right):
                totals[prompt.category][i].accepted += n
            if len(ahead) <= right[0] + 1:
                break
            history = target[: len(history) + right[0] + 1]
        for i, native in enumerate(natives):
            totals[prompt.category][i].batches += native.n_batches - begin[i]
        print(f"{prompt.id}: {len(answer)} tokens", flush=True)

    print("| prompts | accepted | batches of the draft, alone | with lookup | draft stage, by the clock | processor |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind, (alone, multi) in totals.items():
        accepted = " and ".join(f"{total.accepted / max(total.drafted, 1):.2f}" for total in (alone, multi))
        print(
            f"| {kind} | {accepted} | {alone.batches} | {multi.batches} | {alone.wall / multi.wall:.2f} x | "
            f"{alone.processor / multi.processor:.2f} x |"
        )
    for native in natives:
        native.close()
    llm.close()


if __name__ == "__main__":
    main()
