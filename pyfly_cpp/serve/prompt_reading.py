"""The prompt of a chat: what the model's template makes of messages and tools, and whether thoughts may follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyfly_cpp.engine.markers import THOUGHTS
from pyfly_cpp.llama.prompting import Rendered
from pyfly_cpp.serve.answers import read_format
from pyfly_cpp.serve.api_errors import bad_request
from pyfly_cpp.serve.requests import ChatMessage, ChatRequest, read_content, wanted_call
from pyfly_cpp.serve.served_model import Model
from pyfly_cpp.serve.settings import Settings
from pyfly_cpp.serve.thoughts import opened_by
from pyfly_cpp.serve.tools import Tools, read_arguments


@dataclass(frozen=True)
class ChatInput:
    """A chat to be answered, whatever its protocol."""

    body: ChatRequest
    """Its fields, but for messages and tools."""
    messages: list[dict[str, Any]]
    """As templates take them, but for roles and the arguments of calls, which may still be texts."""
    functions: list[dict[str, Any]]
    """As templates are told of them."""
    choice: tuple[str, str | None] | None = None
    """none, auto or required, and the only function that may be called; None: auto if there are functions."""


def input_of(body: ChatRequest) -> ChatInput:
    """The chat of a chat completion. Raises ApiError: a message has something else than text."""
    functions = [
        *(tool.function.raw for tool in body.tools or ()),
        *(function.raw for function in body.functions or ()),
    ]
    messages = [_read_message(message, f"messages[{i}].content") for i, message in enumerate(body.messages)]
    return ChatInput(body, messages, functions, wanted_call(body.tool_choice or body.function_call))


def _read_message(message: ChatMessage, path: str) -> dict[str, Any]:
    own = {key: value for key, value in message.raw.items() if value is not None}
    own["content"] = read_content(message.content, path) or own.pop("refusal", "")
    if message.function_call is not None:
        own["tool_calls"] = [{"function": own.pop("function_call")}]
    if "content" not in message.model_fields_set and not own.get("tool_calls"):
        raise bad_request(f"{path} is missing.", path)
    return own


class ChatPrompt:
    """The prompt of a chat request, and what its answer is held to."""

    def __init__(self, model: Model, settings: Settings, given: ChatInput) -> None:
        """Raises ApiError: the request cannot be served."""
        body = given.body
        choice, name = given.choice or ("auto" if given.functions else "none", None)
        self.tools = Tools(given.functions, choice, name, model.template)
        self.is_older = bool(body.functions)
        """Whether the request speaks of functions, as it was done before tools."""
        self.one_alone = self.is_older or body.parallel_tool_calls is False or (
            self.tools.choice == "required" and body.parallel_tool_calls is None
        )  # fmt: skip
        """Whether an answer may have one call at most."""
        self.grammar = read_format(body)
        self.reads_calls = bool(self.tools.functions) and self.tools.choice != "none"
        """Whether calls are looked for in the answer."""
        if self.tools.choice == "required":
            if self.grammar is not None and self.grammar.kind == "gbnf":
                raise bad_request("an answer cannot be a call and follow a grammar; leave one out.", "grammar")
            self.grammar = self.tools.constraint(not self.one_alone)
        elif self.reads_calls and self.grammar is not None:
            self.reads_calls = self.grammar.kind == "schema"
            self.grammar = self.grammar.or_else(self.tools.constraint(False)) if self.reads_calls else self.grammar
        told, self.budget = _read_thinking(body, settings.reasoning_budget)
        """Most tokens of thoughts; None: no limit."""
        rendered, begun = _render(model, self.tools, given, told)
        self.stop = rendered.stop
        """Texts that end the answer, by the format."""
        self.tokens = rendered.tokens
        self.text = rendered.text or model.text(rendered.tokens, special=True)
        self.closing = begun or opened_by(self.text)
        """What ends the thoughts that the prompt has begun; None: it has begun none, or has ended them."""
        self.continues_thoughts = begun is not None
        """Whether the prompt ends within thoughts that a message has brought."""
        self.opening = ""
        """The end of the prompt that begins the answer's thoughts: their marker and the blanks after it."""
        is_unwanted = self.grammar is not None or self.budget == 0 or told.get("enable_thinking") is False
        self.has_ended_thoughts = self.closing is not None and is_unwanted
        if self.closing is not None and is_unwanted:
            ended = self.closing if self.grammar is None else f"{self.closing}\n\n"  # a grammar may allow no blanks
            self.tokens = [*self.tokens, *model.tokenize(ended, add_bos=False)]
            self.text, self.closing = self.text + ended, None
        elif self.closing is not None and begun is None:
            marker = next(opening for opening, closing in THOUGHTS if closing == self.closing)
            self.opening = self.text[self.text.rindex(marker) :]


def _read_thinking(body: ChatRequest, own_budget: int) -> tuple[dict[str, Any], int | None]:
    """What a chat template is told besides messages and tools, and most tokens of thoughts: the server's own if the
    request does not limit thoughts."""
    effort, out = body.reasoning_effort, dict(body.chat_template_kwargs or {})
    given = (body.reasoning_budget_tokens, body.thinking_budget_tokens)
    budget = next((n for n in given if n is not None), None)
    if budget is None and effort is None and "enable_thinking" not in out:
        budget = own_budget
    if effort is not None:
        out = {"reasoning_effort": effort, **out}
    if effort == "none" or budget == 0:
        out = {"enable_thinking": False, **out}
    return out, None if budget is None or budget < 0 else budget


def _render(model: Model, tools: Tools, chat: ChatInput, more: Mapping[str, Any]) -> tuple[Rendered, str | None]:
    """The prompt, and what ends the thoughts that it continues, if it does. An answer that the messages end with is
    continued, unless the request forbids it. Raises ApiError."""
    given = list(map(_as_templates_take, chat.messages))
    messages, told = tools.prepare(given)
    adds_prompt, continues = chat.body.add_generation_prompt, chat.body.continue_final_message
    if adds_prompt and continues:
        raise bad_request("add_generation_prompt and continue_final_message exclude each other; leave one out.",
                          "continue_final_message")  # fmt: skip
    is_answered = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    if continues and not is_answered:
        raise bad_request("continue_final_message needs a last message of the assistant's.", "continue_final_message")
    if is_answered and (continues or (continues is None and adds_prompt is None)):
        if len(messages) > 1 and messages[-2]["role"] == "assistant":
            raise bad_request("the messages end with two of the assistant's; join them.", "messages")
        before = model.render(messages[:-1], told, more)
        opened = opened_by(before.text or model.text(before.tokens, special=True))
        text, closing = _begun(given[-1], opened, model.template, more.get("enable_thinking") is not False)
        return model.render(messages[:-1], told, more, behind=text), closing
    return model.render(messages, told, more, adds_prompt=adds_prompt is not False), None


def _begun(message: Mapping[str, Any], opened: str | None, template: str, thinks: bool) -> tuple[str, str | None]:
    """An answer as far as the model has written it, and what ends the thoughts in which it breaks off, if it does.

    Args:
        opened: What ends the thoughts that the prompt before it has begun; None: it has begun none.
        thinks: Whether thoughts are wanted.
    """
    thoughts, content = message.get("reasoning_content") or "" if thinks else "", message["content"]
    before, closing = "", opened
    if opened is None:
        if not thoughts:
            return content, None
        opening, closing = next((pair for pair in THOUGHTS if pair[0] in template), THOUGHTS[0])
        before = f"{opening}\n"
    if content:
        return f"{before}{thoughts}\n{closing}\n\n{content}", None
    return before + thoughts, closing if thoughts else None


def _as_templates_take(message: dict[str, Any]) -> dict[str, Any]:
    """A message with a role that templates know, and with objects as the arguments of its calls."""
    own = {**message, "role": {"developer": "system", "function": "tool"}.get(message["role"], message["role"])}
    if own.get("tool_calls"):
        own["tool_calls"] = [
            {**call, "type": "function",
             "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}}
            for call in own["tool_calls"]
        ]  # fmt: skip
    return own


def _arguments(given: str | dict[str, Any] | None) -> dict[str, Any]:
    return read_arguments(given) if isinstance(given, str) else given or {}
