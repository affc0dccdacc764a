"""llama.cpp's own driver drafts with a head as ours does: `pytest -m peer tests/end_to_end/test_peer_drafting.py`."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from pathlib import Path

import llama_cpp
import pytest
from generator import Missing, compiled, source
from heads import DFLASH, DSPARK, EAGLE3, LLAMA, SETTINGS, generate, prompts

from pyfly_cpp import FlyLlama
from pyfly_cpp.decoding.drafters import DRAFTERS
from pyfly_cpp.heads import plan_head, train_head

pytestmark = pytest.mark.peer

K, N_TOKENS, N_PROMPTS = 3, 96, 8
_STEP = re.compile(
    r"draft candidate +0, pos +\d+: +(\d+)|accepted (\d+)/\d+ draft tokens, the last target token is: \((\d+)\)"
)

Drafts = dict[int, list[int]]
"""What was drafted, by the number of the answer's tokens before it."""


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    """llama-speculative-simple, and the environment in which it finds the installed libraries."""
    folder = tmp_path_factory.mktemp("tool")
    libraries = Path(llama_cpp.__file__).parents[1] / "lib"  # with libllama-common, which llama_cpp/lib lacks
    try:
        root = source(folder)
        program = root / "examples" / "speculative-simple" / "speculative-simple.cpp"
        options = (
            f"-I{root / 'common'}",
            f"-I{root / 'vendor'}",
            f"-L{libraries}",
            "-Wl,--no-as-needed",
            "-lllama-common",
        )
        return compiled(root, program, folder / "tool", options), {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    except Missing as why:
        pytest.skip(str(why))


@pytest.fixture
def trained(tmp_path):
    """An EAGLE-3 head that `heads train` made."""
    pytest.importorskip("torch")
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(prompts(30)), encoding="utf-8")
    plan = plan_head(LLAMA, tmp_path / "head.gguf", texts=texts, n_tokens=2000, hours=0.1, kind="f16")
    return train_head(plan, measure=False, n_threads=1).path


def theirs(tool, kind: str, head: Path, prompt: str) -> tuple[list[int], Drafts]:
    program, environment = tool
    command = [
        *(program, "-m", LLAMA, "-md", head, "--spec-type", f"draft-{kind}", "--spec-draft-n-max", K, "--temp", 0),
        *("-n", N_TOKENS, "-c", 1024, "-t", 1, "-tb", 1, "--no-repack", "-fa", "on", "-lv", 5, "-p", prompt),
    ]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stderr[-500:]
    answer: list[int] = []
    draft: list[int] = []
    drafts = {}
    for proposed, n, last in _STEP.findall(done.stdout + done.stderr):
        if proposed:
            draft.append(int(proposed))
        else:
            drafts[len(answer)] = draft
            answer += [*draft[: int(n)], int(last)]
            draft = []
    return answer, drafts


def ours(llm: FlyLlama, prompt: str) -> tuple[list[int], Drafts]:
    tokens, answer = generate(llm, prompt, N_TOKENS)
    drafts = {}
    for _, records in itertools.groupby(llm.records, key=lambda record: record.round):
        step = list(records)
        if draft := [record.token for record in step if record.depth] + list(step[-1].rejected):
            drafts[step[0].position - len(tokens)] = draft
    return answer, drafts


def n_accepted(draft: list[int], answer: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft, answer)))


@pytest.mark.parametrize(
    ("kind", "head"),
    [("eagle3", EAGLE3), ("dflash", DFLASH), ("dspark", DSPARK), ("eagle3", "trained")],
    ids=["eagle3", "dflash", "dspark", "trained-eagle3"],
)
def test_the_same_drafts_are_made_and_accepted(kind, head, tool, request):
    """Compared where both drafted. Their drafts run on past the end of the text, ours end with it, and their log may
    lack its last lines."""
    if head == "trained":
        head = request.getfixturevalue("trained")
    n_steps = n_places = n_same = n_drafted = 0
    accepted = [0, 0]
    llm = FlyLlama(LLAMA, drafter=DRAFTERS[kind].make(head, draft_max=K), trace=True, **SETTINGS)
    for prompt in prompts(N_PROMPTS):
        their_answer, their_drafts = theirs(tool, kind, head, prompt)
        answer, drafts = ours(llm, prompt)
        n = min(len(their_answer), len(answer))
        assert their_answer[:n] == answer[:n]
        n_steps += len(their_drafts)
        for at in their_drafts.keys() & drafts.keys():
            pair = list(zip(their_drafts[at], drafts[at]))
            n_places += 1
            n_same += all(one == other for one, other in pair)
            n_drafted += len(pair)
            for side, draft in enumerate(zip(*pair)):
                accepted[side] += n_accepted(list(draft), answer[at:])
    llm.close()
    print(
        json.dumps({"steps": n_steps, "places": n_places, "same": n_same, "drafted": n_drafted, "accepted": accepted})
    )
    assert n_places > 0.9 * n_steps > 100
    assert n_same >= 0.98 * n_places
    assert abs(accepted[0] - accepted[1]) <= 0.01 * n_drafted and accepted[0] > 0.03 * n_drafted
