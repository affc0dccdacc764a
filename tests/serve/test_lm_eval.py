"""lm-evaluation-harness against the server, as docs/measuring.md has it."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
from documents import ROOT, blocks

pytestmark = pytest.mark.slow  # the import alone takes seconds

pytest.importorskip("tenacity")  # of lm_eval[api]
lm_eval = pytest.importorskip("lm_eval")

CONTEXT, ENDINGS = "Tom has 3 apples and 4 pears. He has", (" 7 fruits.", " no fruits at all.")

TASKS = {
    "gen": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer_number}}"
generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 12}
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


def commands(server):
    """The page's arguments of lm_eval, for this server: {model: its arguments}."""
    out = {}
    for block in blocks(ROOT / "docs" / "measuring.md", "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["lm_eval"]:
                arguments = words[words.index("--model_args") + 1].replace("http://127.0.0.1:8080", server.url)
                assert server.url in arguments
                out[words[words.index("--model") + 1]] = arguments.replace("max_length=4096", "max_length=512")
    return out


def model_of(name, server):
    from lm_eval.api.registry import get_model

    return get_model(name).create_from_arg_string(commands(server)[name])


@pytest.fixture
def manager(tmp_path):
    from lm_eval.tasks import TaskManager

    files = f"{{data_files: {{test: {ROOT / 'tests' / 'data' / 'gsm8k_sample.jsonl'}}}}}"
    for name, text in TASKS.items():
        head = f"task: local_{name}\ndataset_path: json\ndataset_kwargs: {files}\ntest_split: test\n"
        (tmp_path / f"{name}.yaml").write_text(head + text.lstrip())
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, entry, i) for i, entry in enumerate(arguments)]


def test_local_completions(server, alone):
    model = model_of("local-completions", server)
    got = model.loglikelihood(instances("loglikelihood", [(CONTEXT, ending) for ending in ENDINGS]), disable_tqdm=True)
    n = len(alone.tokenize(CONTEXT.encode()))
    for ending, (score, _) in zip(ENDINGS, got):
        answer = alone.create_completion(CONTEXT + ending, max_tokens=1, logprobs=1, echo=True)["choices"][0]
        expected = sum(answer["logprobs"]["token_logprobs"][n:-1])
        np.testing.assert_allclose(score, expected, atol=1e-2)
    ask = instances("generate_until", [(CONTEXT, {"until": ["."], "max_gen_toks": 20, "do_sample": False})])
    expected = alone.create_completion(CONTEXT, max_tokens=20, temperature=0, stop=["."])["choices"][0]["text"]
    assert model.generate_until(ask, disable_tqdm=True) == [expected]


def test_all_kinds_of_tasks(server, alone, manager):
    found = lm_eval.simple_evaluate(
        model="local-completions", model_args=commands(server)["local-completions"],
        tasks=[f"local_{name}" for name in TASKS], task_manager=manager, limit=3, bootstrap_iters=0,
    )  # fmt: skip
    assert 0 <= found["results"]["local_choice"]["acc,none"] <= 1
    assert 1 < found["results"]["local_rolling"]["byte_perplexity,none"] < 20
    for sample in found["samples"]["local_gen"]:
        expected = alone.create_completion(sample["arguments"][0][0], max_tokens=12, temperature=0, stop=["\n"])
        assert sample["resps"] == [[expected["choices"][0]["text"]]]


def test_chat_template(server, alone, manager):
    name = "local-chat-completions"
    found = lm_eval.simple_evaluate(
        model=name, model_args=commands(server)[name], tasks=["local_gen"], task_manager=manager, limit=2,
        apply_chat_template=True, bootstrap_iters=0,
    )  # fmt: skip
    questions = (ROOT / "tests" / "data" / "gsm8k_sample.jsonl").read_text(encoding="utf-8").splitlines()
    for sample, row in zip(found["samples"]["local_gen"], questions):
        messages = [{"role": "user", "content": json.loads(row)["question"]}]
        expected = alone.create_chat_completion(messages, max_tokens=12, temperature=0, stop=["\n"])
        assert sample["resps"] == [[expected["choices"][0]["message"]["content"]]]


def test_a_gate_for_one_run(server):
    """What lm_eval does not know of a task's generation arguments, it sends."""
    model = model_of("local-completions", server)
    sent = model._create_payload(CONTEXT, generate=True, gen_kwargs={"gate": "margin:0.3", "do_sample": False})
    answer = server.post("/v1/completions", **sent).json()
    assert answer["system_fingerprint"].endswith("margin:0.3")
