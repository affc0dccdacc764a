"""The model `pyfly` of lm-evaluation-harness: its tasks, decoded by a FlyLlama.

    lm_eval --model pyfly \\
        --model_args model=target.gguf,draft=draft.gguf,setting=margin:0.3 --tasks gsm8k

finds it through the entry point `lm_eval.models` in releases with plug-ins (after 0.4.13). Up to 0.4.13 models have no
entry points, and a process must import this module before it asks for `pyfly`: `python -m pyfly_cpp.evaluation.harness`
instead of `lm_eval` takes the same arguments; from Python, importing the module is enough.

`generate_until` is what drafting changes. Log-likelihoods are the target's own for any gate; they are here so that
every task runs. Greedy unless a task asks for a temperature.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry, register_model
from tqdm import tqdm

from pyfly_cpp.decoding import PLAIN, Decoding, require_repeatable
from pyfly_cpp.decoding.drafting import AUTO, choose_drafters
from pyfly_cpp.evaluation.drafting import load_generator
from pyfly_cpp.evaluation.generation import Generated, Prompt
from pyfly_cpp.evaluation.parallel import Order, ParallelGenerator, choose_parallel
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.machine.threads import AUTO as AUTO_THREADS

_OPTIONS = (
    "model", "draft", "setting", "drafter", "n_ctx", "max_length", "threads", "gpu_layers", "max_gen_toks", "parallel",
)  # fmt: skip


class PyflyLM(TemplateLM):  # type: ignore[misc]
    """A FlyLlama as a model of the harness."""

    def __init__(
        self,
        model: str = "",
        draft: str | None = None,
        setting: str = "exact",
        drafter: str | None = None,
        n_ctx: int | str = 4096,
        max_length: int | str | None = None,
        threads: int | str | None = None,
        gpu_layers: int | str = -1,
        max_gen_toks: int | str = 256,
        parallel: int | str = 1,
        **rest: Any,
    ) -> None:
        """
        Args:
            model: Path of the target.
            draft: Path of the draft model, or of the head that `drafter` names.
            setting: As in `pyfly-cpp eval`, with `;` or spaces between its words: `margin:0.3;k=8`.
            drafter: `lookup`, `draft`, `cross`, `mtp`, `eagle3`, `dflash`, `dspark` (these with `:FILE`, or the file in
                `draft`), `both` or `none`; else the model's MTP head, or the draft model, or prompt lookup.
            gpu_layers: Layers on the GPU, -1 for all.
            n_ctx: Context, tokens; `max_length`, the harness's usual word for it, goes before.
            max_gen_toks: Longest answer, if a task sets none.
            parallel: Answers that are generated at a time, each with a context of n_ctx; `auto`: as many as fit in a
                quarter of the free memory, 8 at most.
            **rest: What the harness adds of its own (`device`, `batch_size`, ...): only its own names are accepted.

        Raises:
            ValueError: an argument is missing, unknown or wrong.
        """
        super().__init__()
        unknown = [name for name in rest if name not in ("device", "batch_size", "max_batch_size", "trust_remote_code")]
        if unknown:
            raise ValueError(f"the model pyfly has no argument {unknown[0]!r}; it has {', '.join(_OPTIONS)}.")
        if not model:
            raise ValueError("the model pyfly needs model=FILE, the path of a GGUF file, in --model_args.")
        self.setting = PLAIN if drafter == "none" else Decoding.parse(setting.replace(";", " "))
        require_repeatable([self.setting])
        n_threads = AUTO_THREADS if threads is None or threads == AUTO_THREADS else int(threads)
        drafters, _ = choose_drafters(model, draft, AUTO if drafter in (None, "none") else drafter)
        n_ctx = int(n_ctx if max_length is None else max_length)
        n_parallel = choose_parallel(model, n_ctx) if parallel == AUTO else _number_of_texts(parallel)
        self.generator = load_generator(
            model, drafters, [self.setting], None if n_parallel == 1 else n_parallel, n_ctx=n_ctx, n_threads=n_threads,
            n_threads_batch=n_threads, n_gpu_layers=int(gpu_layers), verbose=False,
        )  # fmt: skip
        self._max_gen_toks = int(max_gen_toks)

    # ---- What the harness asks of a model ----------------------------------------------------------------------------

    @property
    def llm(self) -> FlyLlama:
        """The target."""
        return self.generator.llm

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.llm.token_eos())

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has nothing before it."""
        bos = int(self.llm.token_bos())
        return bos if bos >= 0 else self.eot_token_id

    @property
    def max_length(self) -> int:
        """Context, tokens."""
        return self.generator.n_ctx

    @property
    def max_gen_toks(self) -> int:
        """Longest answer, if a task sets none."""
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """Part of the key of the harness's request cache."""
        return str(self.llm.model_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text; markers of a chat template become their tokens. A BOS that the text has is not doubled."""
        tokens: list[int] = self.llm.tokenize(
            string.encode("utf-8"), add_bos=add_special_tokens is not False, special=True
        )
        bos = self.llm.token_bos()
        return tokens[1:] if tokens[:2] == [bos, bos] else tokens

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, by the model's own template."""
        prefix = ""
        if not add_generation_prompt and chat_history[-1]["role"] == "assistant":
            prefix = chat_history[-1]["content"]  # a beginning that the model is to continue
            chat_history = chat_history[:-1]
        tokens = self.generator.render(chat_history, prefix).tokens
        return bytes(self.llm.detokenize(list(tokens), special=True)).decode("utf-8", "replace")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """For the harness's records."""
        return str(self.llm.metadata.get("tokenizer.chat_template", self.llm.chat_format))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers up to a stop text."""
        wanted = [self._understood(*request.args) for request in requests]
        answers = [""] * len(requests)
        made = self._generate(wanted)
        for i, generated in tqdm(made, total=len(requests), disable=disable_tqdm, desc=f"pyfly {self.setting}"):
            answers[i] = generated.text
            self.cache_hook.add_partial("generate_until", requests[i].args, generated.text)
        return answers

    def _understood(self, context: str, given: dict[str, Any]) -> tuple[Prompt, int, float]:
        """The prompt, its longest answer, and the temperature."""
        options = dict(given)
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else [text for text in until if text]
        max_tokens = int(options.pop("max_gen_toks", None) or options.pop("max_tokens", None) or self.max_gen_toks)
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
        max_tokens = min(max_tokens, self.max_length - 1)
        tokens = self.tok_encode(context)[-(self.max_length - max_tokens) :]
        return Prompt(tuple(tokens), tuple(until)), max_tokens, temperature

    def _generate(self, wanted: Sequence[tuple[Prompt, int, float]]) -> Iterator[tuple[int, Generated]]:
        """The result of each, with its place, as they finish."""
        generator = self.generator
        if isinstance(generator, ParallelGenerator):
            orders = [Order(i, *how) for i, how in enumerate(wanted)]
            for order, generated in generator.generate_all(orders, self.setting):
                yield order.key, generated
        else:
            for i, (prompt, max_tokens, temperature) in enumerate(wanted):
                yield i, generator.generate(prompt, self.setting, max_tokens, temperature)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        out = []
        for pair, context, continuation in tqdm(requests, disable=disable_tqdm, desc="pyfly log-likelihoods"):
            answer = self._loglikelihood(context, continuation)
            out.append(answer)
            if pair is not None:
                self.cache_hook.add_partial("loglikelihood", pair, answer)
        return out

    def _loglikelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """ln p(continuation | context), and whether every token of it is the most probable one."""
        if not continuation:
            return 0.0, True
        tokens = [*context, *continuation][-(self.max_length - 1) :]
        first = len(tokens) - len(continuation) - 1  # rows before only lead to the context

        request = self.llm.new_request(
            tokens, self.llm.new_output(tokens, max_tokens=1), n_prompt_logprobs=1, prompt_from=first,
            sampling={"temp": 0.0},
        )  # fmt: skip
        self.generator.configure(PLAIN)
        self.generator.run(request)
        logprobs = request.prompt_logprobs
        return sum(p for p, _ in logprobs), all(p >= top[0][1] for p, top in logprobs)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """ln p of whole texts; longer ones than the context in windows that do not overlap in what they predict."""
        out = []
        for request in tqdm(requests, disable=disable_tqdm, desc="pyfly rolling log-likelihoods"):
            (text,) = request.args
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 2,
                context_len=1,
            )
            pairs = [utils.make_disjoint_window(window) for window in windows]
            total = sum(self._loglikelihood(list(context), list(continuation))[0] for context, continuation in pairs)
            out.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return out


def _number_of_texts(parallel: int | str) -> int:
    with contextlib.suppress(ValueError):
        if (n := int(parallel)) >= 1:
            return n
    raise ValueError(f"parallel must be a number of requests from 1 on, or {AUTO}, not {parallel!r}.")


def main() -> None:
    """lm_eval, with `pyfly` among its models."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    from pyfly_cpp.evaluation import harness  # the module that registers, not this copy of it

    harness.main()
elif "pyfly" not in model_registry:
    register_model("pyfly")(PyflyLM)
