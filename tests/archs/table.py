"""The outcomes of a sweep, as a table in Markdown."""

from __future__ import annotations

from collections import Counter

from exceptions import expected_of


def table(results: dict[str, dict[str, str]]) -> str:
    """A line for every model that does not do all it is put through, and a count of each outcome by trial.

    Args:
        results: By the name of the model, its outcomes by trial (`sweep.outcomes`).
    """
    good = [name for name, result in results.items() if set(result.values()) == {"ok"}]
    lines = [f"{len(good)} of {len(results)} models pass every trial.", "", "| model | what it does not do | why |"]
    lines.append("| --- | --- | --- |")
    for name, result in results.items():
        if name not in good:
            why = "; ".join(one.why for one in expected_of(name)) or "not expected"
            lines.append(f"| {name} | {_bad(result)} | {why} |")
    counts = {trial: Counter() for result in results.values() for trial in result}
    for result in results.values():
        for trial, what in result.items():
            counts[trial]["ok" if what == "ok" else what.split()[0].rstrip(":")] += 1
    lines += ["", "| trial | outcomes |", "| --- | --- |"]
    for trial, found in counts.items():
        lines.append(f"| {trial} | {', '.join(f'{n} {what}' for what, n in found.most_common())} |")
    return "\n".join(lines) + "\n"


def _bad(result: dict[str, str]) -> str:
    trials: dict[str, list[str]] = {}
    for trial, what in result.items():
        if what != "ok":
            trials.setdefault(what.replace("|", "\\|"), []).append(trial)
    return "; ".join(
        f"{'all' if len(names) == len(result) else ', '.join(names)}: {what}" for what, names in trials.items()
    )
