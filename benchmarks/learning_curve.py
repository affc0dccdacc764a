"""What more texts are worth to a head: heads from the first N tokens of one training, judged on the same other texts.

    python benchmarks/learning_curve.py TARGET HEAD.work --tokens 50000 100000 200000 [--passes 1]

HEAD.work is the folder that `pyfly-cpp heads train TARGET -o HEAD` leaves: it holds the texts and the target's states.
Each head begins anew, learns from the texts among the first N tokens, in so many passes, while its rate falls to the
end, and is thrown away. What the whole training holds out is held out by all, so that they are judged alike.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from common import markdown, print_machine

from pyfly_cpp import _native
from pyfly_cpp.heads.fit import Acceptance, Dataset, Fit, spans_of
from pyfly_cpp.heads.plan import layers_of
from pyfly_cpp.heads.state_file import read_states
from pyfly_cpp.heads.target import TargetFile
from pyfly_cpp.heads.texts import Text


def row(name: str, found: Acceptance, kinds: list[str], minutes: float) -> list[str]:
    by_kind = [f"{1 + sum(found.by_kind[kind]):.2f}" for kind in kinds]
    return [name, *(f"{share:.3f}" for share in found.by_depth), f"{found.per_step:.2f}", *by_kind, f"{minutes:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--passes", type=int, default=1)
    given = parser.parse_args()
    print_machine()
    target = TargetFile(given.target)
    layers = layers_of(_native.inspect_model(str(given.target)).n_layer)
    rows = read_states(given.folder / "states.bin", target.n_embd)
    spans = spans_of(rows, Text.read(given.folder / "texts.jsonl"))
    held_out = Dataset(rows, spans, target).held_out
    kinds = sorted({span.kind for span in held_out})
    print(f"{len(spans)} texts, {len(rows)} tokens; {len(held_out)} texts held out", flush=True)
    found = []

    def tell(name: str, result: Acceptance, begun: float) -> None:
        found.append(row(name, result, kinds, (time.monotonic() - begun) / 60))
        print(*found[-1], flush=True)

    for n in given.tokens:
        data = Dataset(rows, [span for span in spans if span.end <= n], target)
        data.held_out = held_out
        begun = time.monotonic()
        fit = Fit(data, target, layers, seed=0, n_passes=given.passes)
        fit.begin()
        tell(f"{n}, nothing learned", fit.accept(), begun)
        while not fit.has_ended:
            for _ in fit.learn(math.inf, time.monotonic()):
                pass
            tell(f"{n}, {fit.n_done} of {given.passes}", fit.judge()[0], begun)
    print(markdown(["tokens, passes", "1", "2", "3", "tokens per step", *kinds, "minutes"], found))


if __name__ == "__main__":
    main()
