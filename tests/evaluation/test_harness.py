"""The plug-in, in the real lm-evaluation-harness, on tasks of local files."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval")

import numpy as np  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from pyfly_cpp import FlyLlama, Margin  # noqa: E402
from pyfly_cpp.evaluation.harness import PyflyLM  # noqa: E402

TASKS = {
    "gen": """
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer_number}}"
generation_kwargs: {until: ["Question:"], do_sample: false, max_gen_toks: 40}
filter_list:
  - name: flexible
    filter:
      - {function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{2,})|(-?[0-9]+)"}
      - {function: take_first}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["4", "apples"]
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{answer}}"
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
}


@pytest.fixture(scope="module")
def model(tiny):
    target, draft = tiny
    return PyflyLM(model=str(target), draft=str(draft), setting="margin:0.3 reconverge", n_ctx=1024, threads=1)


@pytest.fixture
def task_manager(data, tmp_path):
    for name, text in TASKS.items():
        files = f"{{data_files: {{test: {data / 'gsm8k_sample.jsonl'}}}}}"
        head = f"task: local_{name}\ndataset_path: json\ndataset_kwargs: {files}\n"
        (tmp_path / f"{name}.yaml").write_text(head + "test_split: test\n" + text.lstrip())
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def test_registered_under_its_name():
    from lm_eval.api.registry import get_model

    assert get_model("pyfly") is PyflyLM


def test_the_entry_point_names_the_model():
    """What releases with plug-ins look up (group `lm_eval.models`)."""
    from importlib.metadata import EntryPoint

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'\[project\.entry-points\."lm_eval\.models"\]\n(\S+) = "(\S+)"', text)
    assert found[1] == "pyfly" and EntryPoint("pyfly", found[2], "lm_eval.models").load() is PyflyLM


def test_several_at_once(model, tiny, data):
    """Answers in the order of the requests; log-likelihoods as before."""
    arguments = {"model": str(tiny[0]), "draft": str(tiny[1]), "n_ctx": 1024, "threads": 1}
    parallel = PyflyLM(**arguments, setting="margin:0.3 reconverge", parallel="3")
    assert parallel.max_length == 1024
    rows = [json.loads(line) for line in (data / "gsm8k_sample.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [(row["question"], {"until": ["\n"], "max_gen_toks": 4 + i}) for i, row in enumerate(rows)]
    requests = [Instance("generate_until", {}, text, i) for i, text in enumerate(texts)]
    answers, expected = (one.generate_until(requests, disable_tqdm=True) for one in (parallel, model))
    same = sum(a == b for a, b in zip(answers, expected))
    assert same >= len(requests) - 1, "all but a near-tie"
    pairs = [("The total number of", " apples is 4."), ("Question: 2+2?\nAnswer: ", "The")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    for mine, theirs in zip(*(one.loglikelihood(requests, disable_tqdm=True) for one in (parallel, model))):
        assert mine[0] == pytest.approx(theirs[0], abs=2e-2) and mine[1] == theirs[1]
    parallel.generator.close()


def test_all_kinds_of_tasks(model, task_manager):
    results = lm_eval.simple_evaluate(
        model=model, tasks=[f"local_{name}" for name in TASKS], task_manager=task_manager, limit=4, bootstrap_iters=0
    )["results"]
    assert set(results) == {"local_gen", "local_choice", "local_rolling"}
    assert 0 <= results["local_gen"]["exact_match,flexible"] <= 1
    assert 0 <= results["local_choice"]["acc,none"] <= 1
    assert 1 < results["local_rolling"]["byte_perplexity,none"] < 20
    assert model.llm.gate == Margin(0.3) or model.llm.draft_max == 0


def test_chat_template(model, task_manager):
    text = model.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert len(model.tok_encode(text)) == len(model.generator.render([{"role": "user", "content": "Hi"}]).tokens)
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=["local_gen"],
        task_manager=task_manager,
        limit=2,
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    assert results["samples"]["local_gen"][0]["arguments"][0][0].startswith("<|im_start|>user")


def oracle(llm, context, continuation):
    """From the logits of a plain evaluation, token by token."""
    llm.reset()
    llm.eval(context)
    total, greedy = 0.0, True
    for token in continuation:
        row = np.array(llm._ctx.get_logits_ith(-1)[: llm.n_vocab()], dtype=np.float64)
        row = row - row.max()
        total += row[token] - math.log(np.exp(row).sum())
        greedy = greedy and row[token] == 0
        llm.eval([token])
    return total, greedy


def test_loglikelihoods_are_the_targets(model, tiny):
    llm = FlyLlama(str(tiny[0]), n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
    pairs = [
        ("The total number of", " apples is 4."),
        ("", "The total"),
        ("Question: 2+2?\nAnswer: ", "The"),
        ("x", " y"),
    ]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    answers = model.loglikelihood(requests, disable_tqdm=True)
    for (context, continuation), (logprob, is_greedy) in zip(pairs, answers):
        if context:
            tokens = model._encode_pair(context, continuation)
        else:
            tokens = [model.prefix_token_id], model.tok_encode(continuation, add_special_tokens=False)
        expected, greedy = oracle(llm, *tokens)
        assert logprob == pytest.approx(expected, abs=2e-2) and is_greedy == greedy
    text = "The total number of apples is 4."
    (rolling,) = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    expected, _ = oracle(llm, [model.prefix_token_id], model.tok_encode(text, add_special_tokens=False))
    assert rolling == pytest.approx(expected, abs=2e-2)
    llm.close()


def test_generation_is_that_of_the_setting(model, tiny):
    request = Instance("generate_until", {}, ("Question: How many?\nAnswer:", {"until": ["\n"], "max_gen_toks": 30}), 0)
    (loose,) = model.generate_until([request], disable_tqdm=True)
    assert "\n" not in loose
    exact = PyflyLM(model=str(tiny[0]), draft=str(tiny[1]), n_ctx=1024, threads=1)
    plain = PyflyLM(model=str(tiny[0]), drafter="none", n_ctx=1024, threads=1)
    assert exact.generate_until([request], disable_tqdm=True) == plain.generate_until([request], disable_tqdm=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs model=FILE"),
        ({"gat": "exact"}, "no argument 'gat'"),
        ({"setting": "margn:1"}, "Did you mean 'margin'"),
        ({"drafter": "draft"}, "needs a draft model"),
        ({"setting": "margin:0.3 adaptive"}, "leave out 'adaptive'"),
        ({"parallel": "x"}, "parallel must be a number of requests from 1 on, or auto, not 'x'"),
        ({"parallel": "0"}, "parallel must be a number of requests from 1 on, or auto, not '0'"),
    ],
)
def test_wrong_arguments(arguments, message, tiny):
    given = {"model": str(tiny[0]), "n_ctx": 128} if arguments else {}
    with pytest.raises(ValueError, match=message):
        PyflyLM(**given, **arguments)


@pytest.mark.slow
def test_the_command(data, tiny, task_manager, tmp_path):
    arguments = f"model={tiny[0]},draft={tiny[1]},setting=margin:0.3;reconverge,n_ctx=1024,threads=1"
    command = [
        sys.executable, "-m", "pyfly_cpp.evaluation.harness", "--model", "pyfly", "--model_args", arguments,
        "--tasks", "local_gen",
        "--include_path", str(tmp_path), "--limit", "2", "--output_path", str(tmp_path / "out"), "--log_samples",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exact_match" in done.stdout
    (results,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(results.read_text())["config"]["model"] == "pyfly"
