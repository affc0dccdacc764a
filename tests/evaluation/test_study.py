"""The study of what looseness costs (benchmarks/study): plan, records, instructions, and what is made of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import rules  # noqa: E402
from study import plan  # noqa: E402
from study.comparing import Answers, Comparison, choose, find, frontier, noise, runs_of  # noqa: E402
from study.deriving import demands_of, derive, repeated, undecoded  # noqa: E402
from study.flips import CLASSES, classify, count_classes, most_rank, partings  # noqa: E402
from study.forcing import force, sample  # noqa: E402
from study.instructions import CHECKS, Instructions, fits, holds  # noqa: E402
from study.machines import Machine, read_machines  # noqa: E402
from study.means import compare_means, compare_paths  # noqa: E402
from study.page import BEGIN, END, summary, update_page  # noqa: E402
from study.picture import draw  # noqa: E402
from study.recording import Recorder, n_missing  # noqa: E402
from study.records import LIVE, Records, pack  # noqa: E402
from study.report import Report  # noqa: E402

from pyfly_cpp import FlyLlama  # noqa: E402
from pyfly_cpp.decoding.gates import parse_gate  # noqa: E402
from pyfly_cpp.evaluation.files import DataError  # noqa: E402
from pyfly_cpp.evaluation.registry import get_task  # noqa: E402
from pyfly_cpp.evaluation.task import Where  # noqa: E402

# ---- Instructions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        ({"words": [2, 4]}, ["a b", "a b\nc  d", "```\na b\n```"], ["a", "a b c d e", ""]),
        ({"lines": 2}, ["a\n\nb", " a\nb\n"], ["a", "a\nb\nc", ""]),
        ({"numbered": 2}, ["1. a\n2. b", "1.  a\n\n2. b\n"], ["1. a\n3. b", "a\nb", "1) a\n2) b", "1.\n2. b"]),
        ({"prefix": "- "}, ["- a\n- b"], ["- a\nb", "* a", "-a"]),
        ({"sentences": 2}, ["One. Two!", 'She said "no." (He did not.)', "It is 3.5 m. So!"], ["One.", "One. Two", ""]),
        ({"contains": ["river", "because"]}, ["Because of the River."], ["rivers because", "because", ""]),
        ({"lacks": ","}, ["a b"], ["a, b"]),
        (
            {"csv": {"columns": ["name", "size"], "rows": 2}},
            ["name,size\na,1\nb,2", "Name, Size\na, 1\nb, 2", "```csv\nname,size\na,1\nb,2\n```"],
            ["name,size\na,1", "name,size\na,1\nb", "name,size\na,1\nb,", "size,name\na,1\nb,2", ""],
        ),
        (
            {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
            ['{"n": 1}', '```json\n{"n": 1}\n```', '{"n": 1, "more": null}'],
            ['{"n": 1.5}', "{}", "[1]", "{'n': 1}", '{"n": 1} and more', ""],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_holds(check, good, bad):
    ((name, asked),) = check.items()
    assert [text for text in good if not holds(name, asked, text)] == []
    assert [text for text in bad if holds(name, asked, text)] == []


def test_schemas_are_read_as_jsonschema_reads_them():
    jsonschema = pytest.importorskip("jsonschema")
    rng = random.Random(1)
    values = [1, 0, -1, 2.5, True, "x", "new", None, [], ["a"], ["a", "b"], [1, "a"], ["a"] * 5, {}]
    schemas = [
        check["json"]
        for item in Instructions().generate(100)
        for check in item.fields["checks"]
        if "json" in check
    ]  # fmt: skip
    n_good = 0
    for schema in schemas:
        for _ in range(60):
            value = {name: example(part, rng) for name, part in schema["properties"].items()}
            for name in list(value):
                if rng.random() < 0.1:
                    value[name] = rng.choice(values)
                elif rng.random() < 0.05:
                    del value[name]
            if rng.random() < 0.1:
                value["more"] = 1
            expected = jsonschema.Draft202012Validator(schema).is_valid(value)
            # JSON Schema takes 1.0 for an integer; who asks for a whole number does not want 1.0.
            assert fits(schema, value) == expected, (schema, value)
            n_good += expected
    assert 200 < n_good < 1000


def example(schema, rng):
    if "enum" in schema:
        return rng.choice(schema["enum"])
    return {
        "string": "x", "integer": 3, "number": 2.5, "boolean": False, "array": ["a"] * schema.get("minItems", 1),
    }[schema["type"]]  # fmt: skip


def test_instructions_are_the_same_for_a_seed_and_can_be_written_to_a_file():
    task = Instructions()
    items = task.generate(100)
    assert items == task.generate(100) and items[:7] == task.generate(7)
    assert len({item.fields["prompt"] for item in items}) == 100
    assert task.generate(100, seed=1)[0] != items[0]
    rows = [{"id": item.id, **item.fields} for item in items]
    assert [task.parse(Where("f", 1, json.loads(json.dumps(row)))) for row in rows] == items
    with pytest.raises(DataError, match="unknown condition"):
        task.parse(Where("f", 1, {"id": "a", "prompt": "b", "checks": [{"poem": 1}]}))
    assert {name for item in items for check in item.fields["checks"] for name in check} == set(CHECKS)


def test_an_instruction_is_followed_where_all_conditions_hold():
    task = Instructions()
    item = task.parse(Where("f", 1, {"id": "a", "prompt": "b", "checks": [{"lines": 2}, {"prefix": "- "}]}))
    assert task.score(item, "- a\n- b", ()).correct
    verdict = task.score(item, "a\nb\nc", ())
    assert not verdict.correct and verdict.extracted == "lines, prefix"


# ---- The plan --------------------------------------------------------------------------------------------------------


def test_ways_read_back():
    for stage in plan.stages(best=["margin:0.3", "typical"]).values():
        assert stage.ways
        assert len(set(stage.ways)) == len(stage.ways)
        for way in stage.ways:
            assert plan.parse_way(str(way)) == way
    assert str(plan.parse_way("margin:0.3 k=8 #2")) == "margin:0.3 k=8 #2"
    with pytest.raises(ValueError, match="number of the run"):
        plan.parse_way("exact #x")


def test_what_cannot_be_loose_is_left_out():
    assert "entropy:0.3 k=8" in map(str, plan.ways(plan.RULES, 8))
    assert "entropy:0.3 k=3" not in map(str, plan.ways(plan.RULES, 3))


def test_parts_are_spread_over_each_other():
    items = {"gsm8k": list("abcdef"), "humaneval": list("xyz")}
    assert [name for name, _ in plan.interleaved(items)] == ["gsm8k", "humaneval", "gsm8k"] * 3
    assert [item for name, item in plan.interleaved(items) if name == "gsm8k"] == list("abcdef")


def test_the_halves_hang_on_the_problem_alone():
    halves = [plan.half(f"gsm8k-test-{i}") for i in range(1000)]
    assert 450 < halves.count("choose") < 550 and set(halves) == {"choose", "judge"}


def test_forms_of_a_problem_stand_together_and_fewer_items_are_the_first_ones(tmp_path):
    for language in ("de", "fr", "th"):
        same = {"language": language, "question": "?", "answer_number": "1"}
        rows = [{"id": f"{language}-{i}", "gsm8k_test_id": f"p{i}", **same} for i in range(20)]
        (tmp_path / f"mgsm_{language}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    items = plan.read_part("mgsm", tmp_path, 5)
    assert [item.id[:2] for item in items] == ["de", "fr", "th"] * 5
    assert len({item.group for item in items}) == 5
    assert plan.read_part("mgsm", tmp_path)[:15] == items


# ---- Records ---------------------------------------------------------------------------------------------------------

WAYS = tuple(map(plan.parse_way, ("exact k=4", "margin:0.5 k=4", "relaxed:4:0.2 k=2", "plain", "exact k=4 #2")))


@pytest.fixture
def jobs(data):
    task = get_task("gsm8k")
    return [("gsm8k", item, WAYS) for item in task.read(data / "gsm8k_sample.jsonl")[:5]]


def recorder(parallel, records):
    return Recorder(parallel, records, WAYS[0].setting, max_tokens=20)


def test_what_is_recorded(generators, jobs, tmp_path):
    alone, parallel = generators
    records = Records(tmp_path)
    assert n_missing(jobs, records) == 25
    with records.writing({"target": "tiny"}):
        assert recorder(parallel, records).run(jobs) == 25
        assert recorder(parallel, records).run(jobs) == 0
    again = Records(tmp_path)
    assert again.rows == json.loads(json.dumps(records.rows)) and again.pieces == records.pieces
    assert n_missing(jobs, again) == 0 and again.conditions == {"target": "tiny"}
    rows = {(row["item"], row["way"]): row for row in again.rows}
    task = get_task("gsm8k")
    alone.llm.trace = True
    for _, item, ways in jobs:
        prompt = alone.render(task.messages(item), stop=task.stop(item))
        for way in ways:
            row = rows[item.id, str(way)]
            made = alone.generate(prompt, way.setting, 20)
            assert row["answer"] == list(made.tokens) and row["finish"] == made.finish
            assert (row["rounds"], row["drafted"]) == (made.stats.rounds, made.stats.drafted)
            loose = [r for r in made.records if r.origin == "loose"]
            assert [entry[:3] for entry in row["loose"]] == [
                [r.position - len(prompt.tokens), r.token, r.choice] for r in loose
            ]
            assert all(row["answer"][entry[0]] == entry[1] for entry in row["loose"])
            assert again.text(row["answer"]) == alone.llm.detokenize(list(made.tokens)).decode("utf-8", "replace")
    assert any(row["loose"] for row in again.rows) and rows[jobs[0][1].id, "plain"]["drafted"] == 0


def test_what_no_loose_accept_chose_is_the_target_s_choice(generators, jobs, tiny_target_f32, tmp_path):
    _, parallel = generators
    records = Records(tmp_path)
    with records.writing({}):
        recorder(parallel, records).run(jobs)
    answers, items = Answers(records), {(part, item.id): item for part, item, _ in jobs}
    llm = FlyLlama(tiny_target_f32, n_ctx=1024, n_threads=1, logits_all=True, verbose=False)
    for way in WAYS:
        rows = sample(answers, way, items, 3)
        assert len(rows) == 3 and rows == sample(answers, way, items, 5)[:3]
        made = list(force(llm, rows, items))
        assert [len(one.gaps) for one in made] == [len(row["answer"]) - len(row["loose"]) for row in rows]
        assert max(one.gaps.max() for one in made) < 1e-3
    row = next(row for row in answers.of(WAYS[1], plan.POOLED) if row["loose"])
    (silent,) = force(llm, [{**row, "loose": []}], items)  # as if nobody had said which tokens were accepted
    assert silent.gaps.max() == pytest.approx(max(entry[3] for entry in row["loose"]), abs=1e-3)
    other = {key: replace(item, fields={**item.fields, "question": "How many?"}) for key, item in items.items()}
    with pytest.raises(DataError, match="not the one that was recorded"):
        list(force(llm, [row], other))
    llm.close()


def test_a_stop_finishes_the_items_that_were_begun(generators, jobs, tmp_path):
    _, parallel = generators
    jobs = [(*job[:2], WAYS[:3]) for job in jobs]
    begun = [3 * min(parallel.n_parallel, len(jobs) - i) for i in range(0, len(jobs), parallel.n_parallel)]
    for n in begun:
        records = Records(tmp_path)
        with records.writing({}):
            assert recorder(parallel, records).run(jobs, lambda: True) == n
        with open(tmp_path / LIVE, "ab") as file:  # as a killed run leaves it
            file.write(b'{"part": "gsm')
    assert len(begun) > 1 and n_missing(jobs, Records(tmp_path)) == 0


def test_packed_records_are_the_same_records(generators, jobs, tmp_path):
    _, parallel = generators
    records = Records(tmp_path)
    for begin in (0, 2, 4):
        records = Records(tmp_path)
        with records.writing({}):
            recorder(parallel, records).run(jobs[begin : begin + 2])
        if begin < 4:
            path = pack(tmp_path)
            assert path.exists() and not (tmp_path / LIVE).exists()
            assert pack(tmp_path) is None
    again = Records(tmp_path)
    assert {str(row) for row in again.rows} == {str(row) for row in records.rows} and len(again.rows) == 25
    assert again.pieces == records.pieces
    path.write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot be read"):
        Records(tmp_path)


def test_another_prompt_for_a_recorded_item_is_refused(generators, jobs, tmp_path):
    _, parallel = generators
    part, item, ways = jobs[0]
    records = Records(tmp_path)
    with records.writing({}):
        recorder(parallel, records).run([(part, item, ways[:1])])
        other = replace(item, fields={**item.fields, "question": "How many?"})
        with pytest.raises(DataError, match="not the one that was recorded"):
            recorder(parallel, records).run([(part, other, ways[:2])])


def test_records_of_other_models_are_refused(tmp_path):
    with Records(tmp_path).writing({"target": "a"}):
        pass
    with pytest.raises(DataError, match="other target"), Records(tmp_path).writing({"target": "b"}):
        pass


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from study import plan
from study.recording import Recorder
from study.records import Records
from pyfly_cpp import DraftModel, FlyBatch
from pyfly_cpp.decoding.drafting import Drafters
from pyfly_cpp.evaluation.parallel import ParallelGenerator
from pyfly_cpp.evaluation.registry import get_task
ways = tuple(map(plan.parse_way, ("exact k=4", "margin:0.5 k=4")))
items = get_task("gsm8k").read(sys.argv[3])
batch = FlyBatch(sys.argv[4], 3, n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
generator = ParallelGenerator(batch, Drafters((DraftModel(sys.argv[5]),)))
records = Records(Path(sys.argv[6]))
with records.writing({}):
    Recorder(generator, records, ways[0].setting, max_tokens=60).run([("gsm8k", item, ways) for item in items])
generator.close()
"""


@pytest.mark.slow
def test_a_killed_run_goes_on(tiny, data, tmp_path):
    target, draft = map(str, tiny)
    sample = data / "gsm8k_sample.jsonl"
    arguments = [sys.executable, "-c", CHILD, ROOT, ROOT / "benchmarks", sample, target, draft, tmp_path]
    child = subprocess.Popen(list(map(str, arguments)))
    try:
        for _ in range(600):
            if (tmp_path / LIVE).exists() and (tmp_path / LIVE).read_bytes().count(b'"way"') >= 3:
                break
            time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    n = len(Records(tmp_path).rows)
    assert n >= 3
    subprocess.run(list(map(str, arguments)), check=True, timeout=120)
    items = get_task("gsm8k").read(sample)
    rows = Records(tmp_path).rows
    assert sorted((row["item"], row["way"]) for row in rows) == sorted(
        (item.id, way) for item in items for way in ("exact k=4", "margin:0.5 k=4")
    )


# ---- What is made of records -----------------------------------------------------------------------------------------

EXACT_8, LOOSE_8 = plan.parse_way("exact k=8"), plan.parse_way("margin:0.3 k=8")
PIECES = {1: b"Then", 2: b" she", 3: b" has", 4: b" 12", 5: b" 13", 6: b" +", 7: b"\n\n", 8: b" Tom", 9: b" eggs"}


ACCEPTS = [[0, 1, 2, 0.1, 0.5, 0.4]]
"""Of an answer that is loose from its first token on."""


def answer(i, way, right, tokens=(1, 2, 3, 4), rounds=2, drafted=16, loose=(), **more):
    part = ("gsm8k", "humaneval", "mbpp")[i % 3]
    return {
        "part": part, "item": f"{part}-{i}", "unit": f"{part}-{i}", "way": str(way), "prompt": [5, 7], "right": right,
        "said": "", "finish": "eog", "loop": False, "rounds": rounds, "drafted": drafted, "loose": list(loose),
        "answer": list(tokens), **more,
    }  # fmt: skip


def written(folder, rows):
    records = Records(folder)
    with records.writing({"target": "made up"}):
        for row in rows:
            records.add(row, PIECES)
    return Records(folder)


@pytest.fixture
def records(tmp_path):
    """200 items, 140 of them right; margin:0.3 harms 12 and helps 5, by a number (all of the harmful ones but two) or
    a connective, and takes one round instead of two where it is loose."""
    rows = []
    for i in range(200):
        was_right = i < 140
        rows.append(answer(i, EXACT_8, was_right))
        harmed, helped = i < 12, 140 <= i < 145
        right = was_right != (harmed or helped)
        if not (harmed or helped or 20 <= i < 40):
            rows.append(answer(i, LOOSE_8, right))
        elif harmed and i >= 2:
            rows.append(answer(i, LOOSE_8, right, (1, 2, 3, 5), 1, 8, [[3, 5, 4, 0.2, 0.7, 0.4]]))
        else:
            rows.append(answer(i, LOOSE_8, right, (1, 3, 3, 4, 9), 1, 8, [[1, 3, 2, 0.1, 0.6, 0.3]], loop=i == 30))
    return written(tmp_path / "records", rows)


def test_known_flips_give_known_numbers(records):
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    answers = Answers(records)
    c = Comparison(answers.pairs(LOOSE_8, EXACT_8, plan.POOLED))
    assert (c.n, c.right, c.flips.harmful, c.flips.helpful) == (200, 133, 12, 5)
    assert c.flips.p == pytest.approx(tables.mcnemar([[128, 12], [5, 55]], exact=True).pvalue)
    means = compare_means(*answers.sides([LOOSE_8], plan.POOLED))
    assert (means.n, means.n_runs, means.n_exact) == (200, 1, 1)
    assert means.difference.estimate == pytest.approx(-0.035)
    assert means.recovery.estimate == pytest.approx(133 / 140)
    # The normal approximations of a paired difference, and of a ratio of paired means by the delta method.
    deviation = (12 + 5 - 7**2 / 200) ** 0.5
    assert means.difference.high - means.difference.low == pytest.approx(2 * 1.96 * deviation / 200, rel=0.15)
    assert means.recovery.high - means.recovery.low == pytest.approx(2 * 1.96 * deviation / 140, rel=0.15)
    n_loose = 12 + 5 + 20
    n_longer = n_loose - 10
    tokens, rounds = 200 * 5 + n_longer, 400 - n_loose
    assert c.per_round == pytest.approx(tokens / rounds)
    assert c.gain.estimate == pytest.approx((tokens / rounds) / (1000 / 400)) and c.gain.low > 1
    assert c.loose == pytest.approx(100 * n_loose / tokens)
    assert (c.length, c.base_length) == (tokens / 200, 5) and (c.new_loops, c.lost_loops) == (1, 0)
    per_part = [Comparison(answers.pairs(LOOSE_8, EXACT_8, (part,))).flips for part in plan.POOLED]
    assert sum(flips.harmful for flips in per_part) == 12 and sum(flips.helpful for flips in per_part) == 5
    assert Comparison([]).n == 0


def test_time_by_costs():
    machine = Machine("m", "", ((1.0, 1.0), (5.0, 2.0), (9.0, 4.0)), 0.5)
    assert machine.cost({"rounds": 3, "drafted": 0}) == 3
    assert machine.cost({"rounds": 2, "drafted": 16}) == 2 * 4 + 16 * 0.5
    assert machine.cost({"rounds": 2, "drafted": 12}) == 2 * 3 + 12 * 0.5
    c = Comparison([(answer(0, LOOSE_8, True, rounds=1, drafted=8), answer(0, EXACT_8, True))])
    assert c.speed(machine) == 5 / (4 + 4)


def test_a_table_of_machines_that_cannot_be_read(tmp_path):
    (tmp_path / "m.json").write_text('[{"name": "x"}]')
    with pytest.raises(DataError, match="no table of machines"):
        read_machines(tmp_path / "m.json")


def test_the_halves_add_up(records):
    answers = Answers(records)
    halves = [answers.pairs(LOOSE_8, EXACT_8, plan.POOLED, which) for which in ("choose", "judge")]
    assert sum(map(len, halves)) == 200 and min(map(len, halves)) > 70
    assert not {row["item"] for row, _ in halves[0]} & {row["item"] for row, _ in halves[1]}


def test_where_answers_part(records):
    answers = Answers(records)
    found = partings(answers, answers.pairs(LOOSE_8, EXACT_8, plan.POOLED))
    assert len(found) == 37 and all(parting.is_loose for parting in found)
    numbers = [parting for parting in found if parting.what == "number"]
    assert len(numbers) == 10 and {parting.kind for parting in numbers} == {"harmful"}
    first = numbers[0]
    assert (first.place, first.token, first.instead_of, first.before) == (3, " 13", " 12", "Then she has")
    assert (first.margin, first.entropy, first.most_rank) == (0.2, 0.7, 2)
    others = [parting for parting in found if parting.what == "connective"]
    kinds = [parting.kind for parting in others]
    assert [kinds.count(kind) for kind in ("harmful", "helpful", "neither")] == [2, 5, 20]
    assert others[0].after == " has 12 eggs"
    rows = [row for row, _ in answers.pairs(LOOSE_8, EXACT_8, plan.POOLED)]
    assert count_classes(answers, rows) == {**dict.fromkeys(CLASSES, 0), "number": 10, "connective": 27}


def test_noise_is_no_loose_accept_and_the_end_of_an_answer_is_a_difference(tmp_path):
    rows = [
        answer(0, EXACT_8, True),
        answer(0, LOOSE_8, False, (1, 8, 3), loose=[[2, 3, 1, 0.1, 0.5, 0.4]]),
        answer(1, EXACT_8, True),
        answer(1, LOOSE_8, True, (1, 2, 3)),
    ]
    answers = Answers(written(tmp_path, rows))
    noise, end = partings(answers, answers.pairs(LOOSE_8, EXACT_8, plan.POOLED))
    assert (noise.is_loose, noise.place, noise.token, noise.kind) == (False, 1, " Tom", "harmful")
    assert (end.is_loose, end.place, end.token, end.instead_of, end.kind) == (False, 3, "", " 12", "neither")


@pytest.mark.parametrize(
    ("text", "what"),
    [(" 12", "number"), ("x2", "number"), (" +", "operator"), ("-", "operator"), ("\n", "format"), ("**", "format"),
     ("", "format"), (" Tom", "name"), ("maxValue", "name"), ("my_list", "name"), (" Then", "connective"),
     (" need", "connective"), (" journey", "word"), (" größer", "word")],
)  # fmt: skip
def test_what_a_token_is(text, what):
    assert classify(text) == what


@pytest.mark.parametrize(
    ("margin", "p", "rank"),
    [(0.0, 0.5, 2), (0.1, 0.4, 2), (0.1, 0.3, 3), (3.0, 0.01, 80), (None, 0.5, 0), (0.1, None, 0), (0.1, 0.0, 0)],
)
def test_the_rank_that_probability_leaves_room_for(margin, p, rank):
    assert most_rank(margin, p) == rank


def test_means_of_several_runs(tmp_path):
    """Ten items that noise decides: two exact runs have 4 and 6 right, two loose ones 5 and 3. Plain decoding has one
    of them right, once more, and an item that no other has."""
    rows = []
    for text, right in (("exact k=8", 4), ("exact k=8 #2", 6), ("margin:0.3 k=8", 5), ("margin:0.3 k=8 #2", 3)):
        rows += [answer(i, plan.parse_way(text), i < right) for i in range(10)]
    rows += [answer(i, plan.parse_way("plain"), True) for i in (5, 10)]
    answers = Answers(written(tmp_path, rows))
    means = compare_means(*answers.sides(runs_of(answers, LOOSE_8), plan.POOLED))
    assert (means.n_runs, means.n_exact, means.n) == (2, 2.1, 10)
    exact = 0.5 + (2 / 3 - 1 / 2) / 10  # of item 5: 0, 1 and 1
    assert means.difference.estimate == pytest.approx(0.4 - exact)
    assert means.difference.low <= 0.4 - exact <= means.difference.high
    assert means.recovery.estimate == pytest.approx(0.4 / exact)
    plain, absent = ([plan.parse_way(text)] for text in ("plain", "margin:1 k=8"))
    assert compare_means(*answers.sides(plain, plan.POOLED)).difference.estimate == pytest.approx(0.5)
    assert compare_means(*answers.sides(absent, plan.POOLED)) is None
    assert compare_paths(*answers.sides(absent, plan.POOLED)) is None
    (first, second, counts), *_ = noise(answers, answers.ways, plan.POOLED)
    assert (str(first), str(second), counts.harmful, counts.helpful) == ("exact k=8", "exact k=8 #2", 0, 2)


def test_answers_are_compared_with_exact_ones_of_the_same_path(tmp_path):
    """One item of each kind, with two exact answers of which the first is right."""
    loose = [[2, 3, 1, 0.1, 0.5, 0.4]]
    mine = [
        (False, (1, 2, 3, 4), []),  # without a loose accept: compared with itself
        (True, (1, 2, 3, 4), loose),  # on the path of the second exact answer, which is wrong
        (True, (1, 5, 3, 4), loose),  # on the path of the first
        (False, (7, 7, 3, 4), loose),  # on that of none: both stand in
        (False, (1,) * 3, [[1, 1, 5, 0.1, 0.5, 0.4]]),  # parted at the second token, so on the path of both
    ]
    rows = []
    for i, (right, tokens, accepts) in enumerate(mine):
        rows.append(answer(i, plan.parse_way("plain"), True, (1, 5, 9)))
        rows.append(answer(i, plan.parse_way("plain #2"), False, (1, 2, 9)))
        rows.append(answer(i, LOOSE_8, right, tokens, loose=accepts))
    rows.append(answer(9, LOOSE_8, True))  # of an item without an exact answer: left out
    answers = Answers(written(tmp_path, rows))
    paths = compare_paths(*answers.sides([LOOSE_8], plan.POOLED))
    assert (paths.n_without, paths.n_same, paths.n_other, paths.means.n) == (1, 3, 1, 5)
    assert paths.means.difference.estimate == pytest.approx((0 + 1 + 0 - 0.5 - 0.5) / 5)
    assert paths.means.recovery.estimate == pytest.approx(2 / (0 + 0 + 1 + 0.5 + 0.5))
    assert (paths.without.n, paths.without.difference.estimate) == (1, -0.5)
    assert find(answers, LOOSE_8, plan.parse_way("plain"), plan.POOLED).recovery.estimate == pytest.approx(1)


def test_noise_before_the_first_accept_does_not_count(tmp_path):
    """Noise alone decides which of two paths an answer takes, and one of them is wrong. On both paths loose accepts
    harm one answer of ten: that is what is found, with an interval a third narrower."""
    rng = random.Random(7)
    rows = []
    for i in range(400):
        for way in ("plain", "plain #2"):
            path = rng.choice((2, 5))
            rows.append(answer(i, plan.parse_way(way), path == 2, (1, path, 3)))
        path = rng.choice((2, 5))
        is_loose = rng.random() < 0.5
        right = path == 2 and not (is_loose and rng.random() < 0.2)
        rows.append(answer(i, LOOSE_8, right, (1, path, 4), loose=[[2, 4, 3, 0.1, 0.5, 0.4]] if is_loose else []))
    answers = Answers(written(tmp_path, rows))
    sides = answers.sides([LOOSE_8], plan.POOLED)
    blunt, sharp = compare_means(*sides).difference, compare_paths(*sides).means.difference
    assert blunt.low <= -0.05 <= blunt.high and sharp.low <= -0.05 <= sharp.high
    assert sharp.high - sharp.low < 0.7 * (blunt.high - blunt.low)
    check = compare_paths(*sides).without.difference
    assert check.low <= 0 <= check.high


def test_the_frontier_and_the_choice(tmp_path):
    rows = []
    for i in range(100):
        rows.append(answer(i, EXACT_8, True))
        for rule, right, tokens in (
            ("margin:0.2", i > 0, (1, 2, 3, 4)),  # 99 %, 2 x
            ("margin:0.4", i > 2, (1, 2, 3, 4, 5, 6)),  # 97 %, 2.8 x
            ("margin:1", i > 8, (1, 2, 3, 4, 5)),  # worse in both
        ):
            rows.append(answer(i, plan.parse_way(f"{rule} k=8"), right, tokens, 1, loose=ACCEPTS))
    answers = Answers(written(tmp_path, rows))
    found = [(way, find(answers, way, EXACT_8, plan.POOLED)) for way in answers.ways[1:]]
    assert [way.rule for way in frontier(found)] == ["margin:0.2", "margin:0.4"]
    assert choose(found, 0.99).rule == "margin:0.2" and choose(found, 0.97).rule == "margin:0.4"
    assert choose(found, 1.01) is None


def test_the_page(records, tmp_path):
    report = Report(records, read_machines())
    text = report.text()
    assert "| `margin:0.3` | 200 | 66.5 | -12 +5 | 0.14 | -3.5 (" in text and ") | 1, 1 | -3.5 (" in text
    assert "| `margin:0.3` | pooled | 200 | 163, 37, 0 | -3.5 (" in text
    assert "| 0 to 7 | 37 | 12 | 5 | 20 | " in text and "| 0.05 to 0.15 | 0 | 0 | 0 | 0 | " in text
    assert "gsm8k, humaneval, mbpp pooled, 8 drafts a round" in text and "nan" not in text
    first, *rest = [line.split(" | ") for line in summary(report).splitlines() if line.startswith("| `")]
    assert (first[:2], rest) == (["| `margin:0.3` (preset `fast`)", "200"], [])
    assert first[4].endswith(" of 200") and first[5] == "-12 +5"
    assert [cell.strip(" |") for cell in first[-2:]] == ["", ""]
    page = tmp_path / "page.md"
    page.write_text(f"# By hand\n\n{BEGIN}\nold\n{END}\n\nMore by hand.\n")
    update_page(page, text)
    assert page.read_text() == f"# By hand\n\n{BEGIN}\n\n{text}\n\n{END}\n\nMore by hand.\n"
    (tmp_path / "other.md").write_text("no marks")
    with pytest.raises(DataError, match="add both"):
        update_page(tmp_path / "other.md", text)
    pytest.importorskip("matplotlib")
    draw(report, tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes()[:4] == b"\x89PNG"


def test_other_parts_stand_apart(tmp_path):
    """Six pooled items, four of MGSM, of which the last is harmed, and two stories, of which the last loops."""
    rows = []
    for i in range(12):
        part = "mgsm" if i < 10 else "writing"
        more = {"part": part, "item": f"{part}-{i}", "unit": f"{part}-{i}"} if i >= 6 else {}
        rows.append(answer(i, EXACT_8, True, **more))
        rows.append(answer(i, plan.parse_way("exact k=8 #2"), i != 0, (1, 2) if i else (7,), **more))
        loose = [[1, 3, 2, 0.1, 0.6, 0.3]]
        rows.append(answer(i, LOOSE_8, i != 9, (1, 3, 3, 4), 1, loose=loose, **{**more, "loop": i == 11}))
    report = Report(written(tmp_path / "records", rows), read_machines())
    costs = report.costs["margin:0.3"]
    known = {name: (means.n, paths.means.difference.estimate) for name, (means, paths) in costs.items()}
    assert known["pooled"] == known["new items"] == (6, 0)
    assert known["other parts"] == known["mgsm"] == (4, -0.25)
    assert "mgsm" not in Report(Records(tmp_path / "records"), read_machines(), least=5).costs["margin:0.3"]
    assert "| mgsm | 1 | 0 | 3 | 0 | 0 | 0 |" in report.where()
    assert "Other parts: mgsm together" in report.rules()  # those that have no answers are not named
    text = summary(report)
    cells = next(line for line in text.splitlines() if "margin:0.3" in line).split(" | ")
    assert cells[-2] == "2.00, +1 -0 of 2" and cells[-1] == "-25.0 of 4 |"
    against = "`exact k=8` against `exact k=8 #2`"
    assert text.endswith(f"all 1 pairs of exact runs; {against} -1 +0 of 6, {against} -0 +0 of 4 in the other parts.")
    page, tables = tmp_path / "page.md", tmp_path / "tables.md"
    command = [sys.executable, ROOT / "benchmarks" / "fidelity.py", "report", "--records", tmp_path / "records"]
    command += ["--least", "1", "--page", page, "--tables", tables]
    subprocess.run(list(map(str, command)), check=True, timeout=120)
    assert text in page.read_text() and report.text() in tables.read_text()


def test_the_page_of_rules(records):
    text = rules.page(records, 8)
    code, math = (section.splitlines() for section in text.split("\n## ")[1:])
    assert (code[0], math[0]) == ("code", "math")
    # Of 67 answers 3 have another number for their last token, in one round, and 10 part at the second token and are
    # longer by one; 54 are exact's, in two rounds. Each is ended by a token of its own.
    loose = next(line for line in math if "margin:0.3" in line).rstrip(" |").split(" | ")
    tokens, rounds = 3 * 5 + 10 * 6 + 54 * 5, 3 + 10 + 54 * 2
    assert loose[:3] == ["| `margin:0.3`", "67", f"{tokens / rounds:.2f}"]
    assert loose[3].startswith(f"{tokens / rounds / 2.5:.2f} (")
    leading = 100 * (3 * 3 + 10 * 1 + 54 * 4) / (3 * 4 + 10 * 5 + 54 * 4)
    shares = [f"{leading:.0f}", f"{100 * 54 / 67:.0f}", f"{100 * 64 / 67:.0f}"]
    assert loose[5:] == [*shares, "45, 47", f"{tokens / (67 * 5):.2f}", "1, 0"]
    assert "nan" not in text
    with pytest.raises(DataError, match="no answers with 3 drafts"):
        rules.page(records, 3)


def test_answers_that_a_narrower_rule_would_give_too(tmp_path):
    loop = (1, 2, 3, 4, 1, 2, 3, 4)
    assert [repeated(loop, place) for place in (2, 4, 7)] == [0, 1, 4]
    loose = [[[2, 3, 9, 0.1, 0.5, 0.4]], [[2, 3, 9, 0.1, 0.5, 0.4], [7, 4, 9, 0.2, 0.5, 0.4]], []]
    rows = [answer(i, LOOSE_8, True, loop, loose=accepts) for i, accepts in enumerate(loose)]
    written(tmp_path, rows + [answer(i, EXACT_8, True, (1, 2, 9)) for i in range(3)])
    taken = {
        "all(margin:0.3,no-repeat:4)": [0, 2], "all(margin:0.3,no-repeat:5)": [0, 1, 2], "margin:0.2": [0, 2],
        "all(margin:0.3,exact-first:2)": [0, 1, 2], "all(exact-first:3,margin:0.3)": [2],
        "all(margin:0.3,budget:4)": [0, 1, 2], "all(margin:0.3,budget:3.6)": [0, 2], "all(margin:0.3,budget:3)": [2],
        "margin:0.4": [], "regions(prose=margin:0.3)": [], "margin:0.3": [0, 1, 2],
    }  # fmt: skip
    for rule, items in taken.items():
        gate = parse_gate(rule)
        records = Records(tmp_path)
        n_others = 0 if rule in ("margin:0.3", "margin:0.4", "regions(prose=margin:0.3)") else 3 - len(items)
        n_added = 0 if rule == "margin:0.3" else len(items)
        with records.writing(records.conditions):
            assert derive(records, gate) == (n_added, n_others)
            assert derive(records, gate) == (0, n_others)
        rows = Answers(Records(tmp_path)).of(plan.parse_way(f"{gate} k=8"), plan.POOLED)
        assert [row["unit"] for row in rows] == [answer(i, "", True)["unit"] for i in items]
    for rule in ("exact", "all(entropy:0.3,no-repeat:8)", "regions(prose=margin:0.3,code=margin:0.3)"):
        assert demands_of(parse_gate(rule)) is None
        with pytest.raises(ValueError, match=r"name such a rule"), records.writing(records.conditions):
            derive(records, parse_gate(rule))
    lacking = {f"{rule} k=8": 3 - len(items) for rule, items in taken.items() if 0 < len(items) < 3}
    assert undecoded(Records(tmp_path)) == lacking
    said = [f"`{way}` lacks {n}" for way, n in lacking.items()]
    sentence = Report(Records(tmp_path), read_machines()).unfinished()
    assert sorted(sentence.rpartition(": ")[2].rstrip(".").split(", ")) == sorted(said)
    assert sentence in summary(Report(Records(tmp_path), read_machines()))
    # An answer that stands there for several rules is counted once, whichever of them are in the report.
    records = Records(tmp_path)
    assert {row.get("derived") for row in records.rows} == {None, str(LOOSE_8)}
    for left_out in (None, str(LOOSE_8)):
        records.rows = [row for row in records.rows if row["way"] != left_out]
        places = [line for line in Report(records, read_machines()).where().splitlines() if line.startswith("| 0 to 7")]
        assert [line.split(" | ")[1] for line in places] == ["2"]
    regions = demands_of(parse_gate("regions(prose=all(margin:0.3,exact-first:8,no-repeat:8))"))
    assert regions == (True, 0.3, 8, float("inf"), 8)


def test_what_a_guard_would_refuse(tmp_path):
    """Of ten answers with a token that repeats four, three are in a loop; two more repeat one."""
    way = plan.parse_way(f"{plan.SUPERSEDED[0]} k=3")
    rows = [answer(3 * i, EXACT_8, True) for i in range(12)]
    for i in range(12):
        tokens, place = ((1, 2, 3, 4, 1, 2, 3, 4), 7) if i < 10 else ((1, 2, 1), 2)
        rows.append(answer(3 * i, way, True, tokens, loose=[[place, tokens[place], 9, 0.1, 0.5, 0.4]], loop=i < 3))
    text = rules.repetitions(Answers(written(tmp_path, rows), takes_all=True))
    assert f"| `{way.rule}` | gsm8k | 12 | 3 | 12 | 10, 3 | 0, 0 | 0, 0 | " in text
    assert rules.repetitions(Answers(Records(tmp_path))) == ""


def test_nothing_to_compare_with(tmp_path):
    with pytest.raises(DataError, match="no exact answers"):
        Report(written(tmp_path / "a", [answer(0, LOOSE_8, True)]), [])
    with pytest.raises(DataError, match="too few answers with drafts"):
        Report(written(tmp_path / "b", [answer(0, plan.parse_way("plain"), True)]), [])


def test_plain_answers_are_the_exact_ones_of_most_items(tmp_path):
    """All 30 items are decoded plainly, twice, and loosely; ten of them exactly with drafts, for the speed."""
    rows = []
    for i in range(30):
        rows += [answer(i, plan.parse_way(way), i % 3 > 0, rounds=5) for way in ("plain", "plain #2")]
        rows.append(answer(i, LOOSE_8, i % 3 > 0 and i > 5, rounds=1, loose=ACCEPTS))
        rows.append(answer(i, plan.parse_way("margin:0.3 k=3"), i % 3 > 0))
        if i < 10:
            rows.append(answer(i, EXACT_8, True))
    records = written(tmp_path, rows)
    assert "`exact`" not in Report(records, read_machines(), 11).text()
    text = Report(records, read_machines()).text()
    assert "`exact`" in text
    line = next(line for line in text.splitlines() if line.startswith("| `margin:0.3` | 30 | "))
    cells = line.split(" | ")
    assert cells[2:4] == ["53.3", "-4 +0"]
    # Ten items have three exact runs each, and the four wrong ones of these one that is right.
    assert cells[5].startswith(f"{100 * (16 - 20 - 4 / 3) / 30:+.1f} (") and cells[6] == "1, 2.3"
    assert cells[7] == cells[5] and (cells[10][:4], cells[11]) == ("2.00", "10")
    # Of all draft lengths 16 and 20 items are right; the 20 are answers without a loose accept.
    line = next(line for line in text.splitlines() if line.startswith("| `margin:0.3` | pooled | 30 | 30, 30, 0 | "))
    cells = line.split(" | ")
    assert cells[4].startswith(f"{100 * (16 - 20 - 4 / 3) / 2 / 30:+.1f} (")
    assert cells[6].startswith(f"{100 * (18 - 20 - 4 / 3) / 30:+.1f} (") and cells[7] == "2, 2.3"


def test_a_rule_that_was_proposed_is_judged_on_new_items(tmp_path):
    """margin:0.3 has 20 items, the rule that was made of what it did 50, and loses on those that it has alone."""
    rows = []
    for i in range(50):
        rows.append(answer(i, plan.parse_way("plain"), True))
        rows.append(answer(i, plan.parse_way("margin:0.2 k=8"), i < 35, loose=ACCEPTS))
        if i < 20:
            rows.append(answer(i, LOOSE_8, i < 15, loose=ACCEPTS))
    lines = Report(written(tmp_path, rows), read_machines(), 30).text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `margin:0.2` | ")][:3]
    assert [(line[1], line[2], line[4][:5]) for line in cells[:2]] == [
        ("pooled", "50", "-30.0"),
        ("new items", "30", "-50.0"),
    ]
    assert cells[2][1] == "gsm8k" and not any("margin:0.3` | pooled" in line for line in lines)
    # The narrower rule takes no items from the wider one.
    lines = Report(Records(tmp_path), read_machines(), 20).text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `margin:0.3` | ")][:2]
    assert [line[1:3] for line in cells] == [["pooled", "20"], ["new items", "20"]]


def test_margins_behind_the_beginning(tmp_path):
    rows = []
    for place, margin, right in ((3, 0.1, False), (8, 0.1, False), (9, 0.2, False), (9, 0.1, True)):
        item = len(rows)
        rows.append(answer(item, plan.parse_way("plain"), True, range(10)))
        tokens = (*range(place), 11, *range(place + 1, 10))
        rows.append(answer(item, LOOSE_8, right, tokens, loose=[[place, 11, place, margin, 0.5, 0.4]]))
    text = Report(written(tmp_path, rows), read_machines()).text()
    assert "| 0.05 to 0.15 | 2 | 1 | 0 | 1 | " in text and "| 0.15 to 0.3 | 1 | 1 | 0 | 0 | " in text


def test_what_has_no_speed_is_not_drawn(records, tmp_path):
    pytest.importorskip("matplotlib")
    loose = [row for row in records.rows if row["way"] == str(LOOSE_8)]
    plain = [{**row, "way": "plain"} for row in loose]
    with pytest.raises(DataError, match="nothing can be drawn"):
        draw(Report(written(tmp_path / "other", [*loose, *plain]), read_machines()), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
