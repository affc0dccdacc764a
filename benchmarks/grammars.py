"""What a JSON schema costs: answers with and without one, greedy and sampled.

    python benchmarks/grammars.py [--model MODEL] [--drafter lookup] [--repeats 3]

One thread decodes, and its processor time is counted.
"""

from __future__ import annotations

import argparse
import time

from common import markdown, print_machine

from pyfly_cpp import FlyLlama
from pyfly_cpp.models.named import embedded_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 30},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 3, "maxItems": 5},
    },
    "required": ["name", "age", "city", "hobbies"],
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 4, "maxItems": 4}
QUESTION = "Write four people of a village as JSON, each with name, age, city and hobbies."
FORMATS = {"free": None, "a schema": {"type": "json_schema", "json_schema": {"schema": PEOPLE}}}


def measure(llm: FlyLlama, form: object, temperature: float, n_repeats: int) -> tuple[int, float]:
    """Tokens, and seconds of processor time."""
    messages, n, begun = [{"role": "user", "content": QUESTION}], 0, time.process_time()
    for seed in range(n_repeats):
        answer = llm.create_chat_completion(
            messages, response_format=form, temperature=temperature, seed=seed, max_tokens=200
        )
        n += answer["usage"]["completion_tokens"]
    return n, time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print_machine()
    llm = FlyLlama(
        given.model or str(embedded_model()), drafter=given.drafter, n_ctx=1024, n_threads=1, n_threads_batch=1,
        verbose=False,
    )  # fmt: skip
    rows = []
    for temperature in (0.0, 0.7):
        for name, form in FORMATS.items():
            measure(llm, form, temperature, 1)
            n, seconds = measure(llm, form, temperature, given.repeats)
            each = f"{1e3 * seconds / n:.2f}", f"{n / seconds:.1f}"
            rows.append([f"{name}, temperature {temperature:g}", str(n), *each])
    print(markdown(["answer", "tokens", "ms a token", "tokens/s"], rows))


if __name__ == "__main__":
    main()
