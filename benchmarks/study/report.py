"""What is recorded, as tables (Markdown)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from resumable import markdown

from pyfly_cpp.evaluation.files import DataError
from pyfly_cpp.evaluation.statistics import Flips, wilson
from study.cells import (
    CELLS,
    PART_CELLS,
    PLACES,
    class_cells,
    flip_cells,
    flips_cell,
    gain_cells,
    half_cells,
    loops_cell,
    margin_rows,
    mean_cells,
    number,
    part_cell,
    part_rows,
    path_cell,
    place_rows,
    quoted,
    rule_cells,
    within,
)
from study.comparing import (
    Answers,
    Found,
    base_of,
    choose,
    find,
    frontier,
    noise,
    reference_of,
)
from study.deriving import is_part, origin_of, undecoded
from study.flips import CLASSES, Parting, count_classes, partings
from study.machines import Machine
from study.means import Means, Paths, compare_means, compare_paths
from study.plan import OTHER, PARTS, POOLED, RULES, Way
from study.records import Records

LEGEND = """
Intervals are of 95 %. Flips: right in {reference} and wrong here (-), and the other way round (+), on the items that
both have. p: McNemar's exact test. All runs: mean accuracy of all runs of the rule less that of all runs of exact
decoding, plain or with drafts, which differ by nothing but noise, in points; runs: how many there are of each, to an
item. Same paths: the same difference without the noise that loose accepts have no part in: an answer is compared with
the exact ones that are the same, token for token, up to its first loose accept; one without loose accepts is an exact
one. Recovery: the one accuracy over the other, of loose rules on the same paths. x exact: tokens a round over those of
exact decoding with as many drafts, on the items that both have. Loose: accepts of 100 tokens. Tokens: of an answer.
Loops: answers in a loop where {reference}'s is not (+), and the other way round (-). The last columns: speed over plain
decoding, as costs say:
"""
RULES_LEGEND = """## What loose accepts cost, all draft lengths

New items: those that no other loose rule has, apart from rules that ask more of an accept than this one does; a rule
that was proposed from the answers of others is judged on these.
Other parts: {other} together, which are not among the pooled ones; below, those with enough items alone.
Answers: without a loose accept; with one, and exact ones on the same path up to it; with one, and none on its path (all
exact ones of the item stand in). Check: the answers without a loose accept against all exact ones: noise, if they are
exact ones, too. An interval without width says that no item differed, not that none can.
"""
HEAD = (
    "rule",
    "items",
    "right, %",
    "flips",
    "p",
    "all runs",
    "runs",
    "same paths",
    "recovery, %",
    "tokens a round",
    "x exact",
    "of items",
    "loose",
    "tokens",
    "loops",
)
POOLED_NAME, OTHER_NAME = "pooled", "other parts"
LEAST = (0.99, 0.97)
"""Recoveries for which a rule is chosen."""
MOST_EXAMPLES = 24


class Report:
    """The tables of some records."""

    def __init__(self, records: Records, machines: Sequence[Machine], least: int = 1) -> None:
        """`least`: ways with fewer items are left out. Raises DataError where nothing can be compared."""
        self.answers = Answers(records)
        self._about = records.about
        self._undecoded = undecoded(records)
        self.machines = machines
        self._found: dict[tuple[Way, tuple[str, ...], str | None], Found] = {}
        reference = reference_of(self.answers)
        if reference is None:
            raise DataError(f"{records.folder} has no exact answers to compare with; record some.")
        self.reference = reference
        self.least = least
        ways = [way for way in self.answers.ways if len(self.answers.of(way, self.answers.parts)) >= least]
        self.ways = sorted(ways, key=_place)
        self.parts = [part for part in POOLED if part in self.answers.parts]
        self.lengths = sorted({way.k for way in self.ways if way.k}, reverse=True)
        if not self.lengths:
            raise DataError(f"{records.folder} has too few answers with drafts; record some.")

    def of_length(self, k: int) -> list[Way]:
        """The ways with K drafts in a round; plain decoding stands beside the largest K."""
        return [way for way in self.ways if (way.k or max(self.lengths)) == k]

    def compared(self, k: int, parts: Sequence[str], which: str | None = None) -> list[tuple[Way, Found]]:
        """Those of them that have answers to items of these parts, compared with exact decoding."""
        found = [(way, self.find(way, tuple(parts), which)) for way in self.of_length(k)]
        return [(way, one) for way, one in found if one.against.n]

    def find(self, way: Way, parts: tuple[str, ...], which: str | None = None) -> Found:
        """A way against exact decoding."""
        key = way, parts, which
        if key not in self._found:
            self._found[key] = find(self.answers, way, self.reference, parts, which)
        return self._found[key]

    def loose(self, k: int, parts: Sequence[str], which: str | None = None) -> list[tuple[Way, Found]]:
        """Of these the first runs of loose rules."""
        found = self.compared(k, parts, which)
        return [(way, one) for way, one in found if not way.setting.is_exact and way.run == 1]

    @cached_property
    def costs(self) -> dict[str, dict[str, tuple[Means, Paths]]]:
        """Of each loose rule with enough items, all draft lengths as runs of it, on which what is accepted hardly
        hangs: pooled, new items, each part, other parts together, and those of them that have enough items. What has
        no items is left out."""
        out: dict[str, dict[str, tuple[Means, Paths]]] = {}
        ways = [way for way in self.answers.ways if not way.setting.is_exact]
        for rule in dict.fromkeys(way.rule for way in sorted(ways, key=_place)):
            runs = [way for way in ways if way.rule == rule]
            gate = runs[0].setting.gate
            mine, exact = self.answers.sides(runs, (*self.parts, *OTHER))
            others, _ = self.answers.sides([way for way in ways if not is_part(way.setting.gate, gate)], self.parts)
            pooled = [key for key in mine if key[0] in self.parts]
            chosen = {POOLED_NAME: pooled, "new items": [key for key in pooled if key not in others]}
            chosen |= {part: [key for key in mine if key[0] == part] for part in self.parts}
            chosen[OTHER_NAME] = [key for key in mine if key[0] in OTHER]
            others_alone = {part: [key for key in mine if key[0] == part and key in exact] for part in OTHER}
            chosen |= {part: keys for part, keys in others_alone.items() if len(keys) >= self.least}
            if sum(key in exact for key in pooled) < self.least:
                continue
            out[rule] = {}
            for name, keys in chosen.items():
                some = {key: mine[key] for key in keys}
                means, paths = compare_means(some, exact), compare_paths(some, exact)
                if means is not None and paths is not None:
                    out[rule][name] = means, paths
        return out

    @cached_property
    def noise_pairs(self) -> list[tuple[Way, Way, Flips]]:
        """All pairs of exact ways, and what flips between them."""
        return noise(self.answers, self.ways, self.parts)

    # ---- Sections ----------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """All of it."""
        sections = [self.recorded(), self.rules()]
        for k in self.lengths:
            sections += [self.pooled(k), self.by_part(k)]
        sections += [self.noise(), self.halves(), self.where()]
        return "\n\n".join(section for section in sections if section)

    def recorded(self) -> str:
        """What there is."""
        counts = []
        for part in self.answers.parts:
            n = [len({row["item"] for row in self.answers.of(way, (part,))}) for way in self.ways]
            counts.append(f"{part} {min(n)}" + (f" to {max(n)}" if min(n) < max(n) else ""))
        every = [row for way in self.answers.ways for row in self.answers.of(way, self.answers.parts)]
        n_taken = sum("derived" in row for row in every)
        taken = f" ({n_taken} of them taken over from wider rules)" if n_taken else ""
        return "\n".join(
            [
                f"{len(every)} answers{taken}, greedy, in the model's chat format. {self._about}.",
                f"Items (of the way with fewest, of the one with most): {', '.join(counts)}. "
                f"What has fewer than {self.least} is left out.{self.unfinished(' ')}",
                LEGEND.format(reference=self.reference.title),
                *(f"- {machine.name}: {machine.about}" for machine in self.machines),
            ]
        )

    def unfinished(self, before: str = "") -> str:
        """A sentence, behind `before`, on rules that took answers over and lack the others; empty where none does."""
        lacking = [f"`{way}` lacks {n}" for way, n in self._undecoded.items()]
        if not lacking:
            return ""
        return (
            f"{before}Answers in which a wider rule accepted more must still be recorded, or too few loose accepts are "
            f"counted: {', '.join(lacking)}."
        )

    def rules(self) -> str:
        """What loose accepts cost."""
        rows = [
            [f"`{rule}`", name, str(means.n), *rule_cells(means, paths)]
            for rule, costs in self.costs.items()
            for name, (means, paths) in costs.items()
        ]
        if not rows:
            return ""
        head = ["rule", "part", "items", "answers", "same paths", "recovery, %", "all runs", "runs", "check"]
        other = [part for part in OTHER if part in self.answers.parts] or OTHER
        return f"{RULES_LEGEND.format(other=', '.join(other))}\n{markdown(head, rows)}"

    def pooled(self, k: int) -> str:
        """The accuracy parts together."""
        rows = []
        for way, found in self.compared(k, self.parts):
            c = found.against
            rows.append(
                [
                    way.title,
                    str(c.n),
                    f"{100 * c.right / c.n:.1f}",
                    *(["", ""] if way == self.reference else flip_cells(found)),
                    *mean_cells(found.means),
                    path_cell(found.paths),
                    within(found.recovery, 100, 1),
                    f"{c.per_round:.2f}",
                    *(["", ""] if way.setting.is_plain or way == base_of(way) else gain_cells(found)),
                    f"{c.loose:.1f}",
                    f"{c.length:.0f}",
                    "" if way == self.reference else loops_cell(c),
                    *(f"{c.speed(machine):.2f}" for machine in self.machines),
                ]
            )
        head = [*HEAD, *(machine.name for machine in self.machines)]
        on = [f"`{way.rule}`" for way in frontier(self.loose(k, self.parts))]
        best = f"\n\nNo other rule beats these in both recovery and tokens a round: {', '.join(on)}." if on else ""
        return f"## {', '.join(self.parts)} pooled, {k} drafts a round\n\n{markdown(head, rows)}{best}" if rows else ""

    def by_part(self, k: int) -> str:
        """Every part alone."""
        of = {part: dict(self.compared(k, (part,))) for part in self.answers.parts}
        rows = []
        for way in self.of_length(k):
            cells = [part_cell(way, of[part].get(way), way == self.reference) for part in self.answers.parts]
            if any(cells):
                c = self.find(way, tuple(self.answers.parts)).against
                cells.append("" if way == self.reference else f"{loops_cell(c)} of {c.n}")
                rows.append([way.title, *cells])
        if not rows:
            return ""
        text = f"### Each part, {k} drafts a round: points against exact (flips), tokens a round over exact's"
        heads = [*(f"{part} ({PARTS[part].task.criterion})" for part in self.answers.parts), "loops in all"]
        return f"{text}\n\n{markdown(['rule', *heads], rows)}"

    def noise(self) -> str:
        """Exact ways against each other."""
        found = self.noise_pairs
        if not found:
            return ""
        rows = [
            [f"`{first}`", f"`{second}`", str(counts.n), flips_cell(counts),
             within(wilson(counts.harmful + counts.helpful, counts.n), 100, 1)]
            for first, second, counts in found
            if first == found[0][0]
        ]  # fmt: skip
        table = markdown(["one", "other", "items", "flips", "of 100 items"], rows)
        return f"## The noise: exact decoding against exact decoding\n\n{table}\n\n{self.noise_in_all()}"

    def noise_in_all(self) -> str:
        """One sentence; empty where there is one exact way alone."""
        found = self.noise_pairs
        if not found:
            return ""
        n_flips = sum(counts.harmful + counts.helpful for _, _, counts in found)
        share = 100 * n_flips / sum(counts.n for _, _, counts in found)
        elsewhere = noise(self.answers, self.ways, OTHER)
        most = [max(pairs, key=lambda entry: entry[2].n) for pairs in (found, elsewhere) if pairs]
        largest = [
            f"`{first}` against `{second}` {flips_cell(counts)} of {counts.n}{where}"
            for (first, second, counts), where in zip(most, ("", " in the other parts"))
        ]
        return (
            f"Exact decoding against itself: {share:.1f} flips of 100 items over all {len(found)} pairs of exact runs; "
            f"{', '.join(largest)}."
        )

    def halves(self) -> str:
        """What is chosen on one half, judged on the other."""
        sections = []
        for k in self.lengths:
            tried, judged = (self.loose(k, self.parts, which) for which in ("choose", "judge"))
            if not tried or not judged:
                continue
            others = dict(judged)
            rows = [
                [f"`{way.rule}`", *half_cells(found), *half_cells(others[way])]
                for way, found in tried
                if way in others
            ]  # fmt: skip
            text = [f"### {k} drafts a round\n\n" + markdown(
                ["rule", "items to choose", "recovery, %", "x exact", "items to judge", "recovery, %", "x exact"], rows
            )]  # fmt: skip
            for least in LEAST:
                way = choose(tried, least)
                if way is None or way not in others:
                    text.append(f"No rule recovers {100 * least:.0f} % on the first half.")
                    continue
                found = others[way]
                text.append(
                    f"Chosen for a recovery of at least {100 * least:.0f} % there: `{way.rule}`; judged: recovery "
                    f"{within(found.recovery, 100, 1)} %, {within(found.gain, 1, 2)} x the tokens a round, flips "
                    f"{flips_cell(found.against.flips)}."
                )
            sections.append("\n\n".join(text))
        if not sections:
            return ""
        head = (
            "## Chosen on one half, judged on the other\n\nThe half of an item is the parity of the first byte of "
            "SHA-256 of `half ` and its id (of its problem, where several are of one): even chooses, odd judges."
        )
        return "\n\n".join([head, *sections])

    def where(self) -> str:
        """Where answers part from exact's."""
        every: list[tuple[Way, Parting]] = []
        loose: Counter[str] = Counter()
        seen: set[tuple[str, str, str]] = set()  # what several rules share, counts once
        for k in self.lengths:
            for way, _ in self.loose(k, self.parts):
                pairs = self.answers.pairs(way, self.reference, (*self.parts, *OTHER))
                pairs = [(row, base) for row, base in pairs if origin_of(row) not in seen]
                seen.update(origin_of(row) for row, _ in pairs)
                every += [(way, parting) for parting in partings(self.answers, pairs)]
                loose.update(count_classes(self.answers, [row for row, _ in pairs if row["part"] in self.parts]))
        found = [entry for entry in every if entry[1].part in self.parts]
        if not found:
            return ""
        rows = []
        for what in CLASSES:
            mine = [parting for _, parting in found if parting.is_loose and parting.what == what]
            rows.append([what, str(loose[what]), *class_cells(mine)])
        rows.append(["noise, or an end", "", *class_cells([parting for _, parting in found if not parting.is_loose])])
        head = ["first difference", "loose accepts", *CELLS]
        text = (
            "## Where answers part from exact's, all loose rules together\n\nThe first token that differs, by what it "
            "is, or what exact has there; margin and entropy: medians, nats, of harmful ones / of the others;\n"
            f"second: surely the target's second choice.\n\n{markdown(head, rows)}"
        )
        loosely = [parting for _, parting in found if parting.is_loose]
        places = markdown(["first difference at token", *CELLS], place_rows(loosely))
        margins = markdown([f"margin, from token {PLACES[1]} on", *CELLS], margin_rows(loosely))
        examples = self.examples([entry for entry in found if entry[1].kind == "harmful"])
        by_part = f"Of all parts:\n\n{markdown(list(PART_CELLS), part_rows([parting for _, parting in every]))}"
        return "\n\n".join([text, places, margins, by_part, examples])

    def examples(self, harmful: Sequence[tuple[Way, Parting]]) -> str:
        """Harmful partings, each token in its place once."""
        seen: dict[tuple[str, str, int, str], tuple[Parting, list[Way]]] = {}
        for way, parting in harmful:
            key = parting.part, parting.item, parting.place, parting.token
            seen.setdefault(key, (parting, []))[1].append(way)
        most = sorted(seen.values(), key=lambda entry: -len(entry[1]))[:MOST_EXAMPLES]
        rows = [
            [p.item, str(p.place), quoted(p.before[-40:]), quoted(p.token), quoted(p.instead_of), quoted(p.after),
             p.what if p.is_loose else "noise", number(p.margin), str(len(ways))]
            for p, ways in most
        ]  # fmt: skip
        if not rows:
            return "No flip did harm."
        head = ["item", "place", "behind", "accepted", "instead of", "then", "class", "margin", "ways"]
        text = f"Harmful ones ({len(rows)} of {len(seen)}, those first that most ways share):"
        return f"{text}\n\n{markdown(head, rows)}"


def _place(way: Way) -> tuple[int, int, str, int]:
    """Long drafts first, then as the plan names the rules."""
    rule = RULES.index(way.rule) if way.rule in RULES else len(RULES)
    return -way.k if way.k else -99, rule, way.rule, way.run
