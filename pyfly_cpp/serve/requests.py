"""The requests as pydantic models: what is checked, what the description at /openapi.json shows, and the texts in them.

Unknown fields are ignored, and named in a header of the response. A field that may be left out may also be null.
"""

# No `from __future__ import annotations`: on Python 3.9, pydantic could not read `X | None` in a string.
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Optional, TypeVar, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler

from pyfly_cpp.serve.api_errors import bad_request

T = TypeVar("T", bound="RequestBody")

_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_MOST_BIASES = 1024
_MOST_STOPS = 1024


def _whole(value: Any) -> Any:
    """The value, with 3.0 as 3: in JSON, both are integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(values: Any) -> Any:
    # There may be millions, and rarely a float among them.
    return list(map(_whole, values)) if isinstance(values, list) and float in set(map(type, values)) else values


def _few_biases(value: Any) -> Any:
    # Before the entries are looked at: pydantic would list what is wrong with each of a million.
    if isinstance(value, (dict, list)) and len(value) > _MOST_BIASES:
        raise ValueError(f"must have at most {_MOST_BIASES} entries, not {len(value)}")
    return value


def _only(*kinds: str, what: str) -> BeforeValidator:
    """What refuses an object of another type by the name of that type, instead of for a field that it lacks."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise ValueError(f"is of the type {kind[:40]!r}; this server takes {what}")
        return value

    return BeforeValidator(check)


# Lists fail at the first wrong entry: there may be a million, and pydantic would tell each.
_SOME = Field(min_length=1, max_length=2**16, fail_fast=True)
_STOP = Field(max_length=256)
_Token = Annotated[int, Field(ge=0, le=_INT32)]
_Tokens = Annotated[list[_Token], Field(min_length=1, fail_fast=True), BeforeValidator(_all_whole)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_BiasedToken = Annotated[list[Union[_Token, str, _Bias, Literal[False]]], Field(min_length=2, max_length=2)]
_Limit = Annotated[int, Field(ge=-1, le=_INT32)]
_Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
_Effort = Optional[Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]]
_ChoiceWord = Literal["none", "auto", "required"]


_TopP = Annotated[Optional[float], Field(ge=0, le=1)]
_TopK = Annotated[Optional[int], Field(ge=-1, le=_INT32)]
_Seed = Annotated[Optional[int], Field(ge=-_INT64 - 1, le=_INT64)]
_Gate = Annotated[Optional[str], Field(max_length=256)]
_Window = Annotated[Optional[str], Field(max_length=64)]
_DraftMax = Annotated[Optional[int], Field(ge=0, le=_INT32)]


class RequestBody(BaseModel):
    """A part of a request, or all of it."""

    model_config = ConfigDict(strict=True)

    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls: type[T], value: Any, handler: ModelWrapValidatorHandler[T]) -> T:
        if not isinstance(value, dict):
            return handler(value)
        made = handler({name: _whole(entry) for name, entry in value.items()})
        made._raw = value
        return made

    @property
    def raw(self) -> dict[str, Any]:
        """The object as it came, for others: a template that reads it, a client that gets it back, the log."""
        return self._raw


class SharedFields(RequestBody):
    """The fields of all routes whose answers the model writes, but for Anthropic's."""

    model: Optional[str] = None
    temperature: Optional[float] = Field(None, ge=0, le=100)
    top_p: _TopP = None
    top_k: _TopK = None
    min_p: Optional[float] = Field(None, ge=0, le=1)
    typical_p: Optional[float] = Field(None, ge=0, le=1)
    repeat_penalty: Optional[float] = Field(None, ge=0.01, le=10)
    presence_penalty: Optional[float] = Field(None, ge=-2, le=2)
    frequency_penalty: Optional[float] = Field(None, ge=-2, le=2)
    mirostat_mode: Optional[int] = Field(None, ge=0, le=2)
    mirostat: Optional[int] = Field(None, ge=0, le=2)
    mirostat_tau: Optional[float] = Field(None, ge=0, le=100)
    mirostat_eta: Optional[float] = Field(None, ge=0, le=1)
    seed: _Seed = None
    stream: Optional[bool] = None
    stop: Union[
        Annotated[str, _STOP],
        Annotated[list[Annotated[str, _STOP]], Field(max_length=_MOST_STOPS, fail_fast=True)],
        None,
    ] = None
    logit_bias: Annotated[
        Union[dict[str, Union[_Bias, Literal[False]]], list[_BiasedToken], None], BeforeValidator(_few_biases)
    ] = None
    ignore_eos: Optional[bool] = None
    grammar: Optional[str] = None
    json_schema: Optional[dict[str, Any]] = None
    t_max_predict_ms: Optional[int] = Field(None, ge=-1, le=_INT64)
    timings_per_token: Optional[bool] = None
    return_progress: Optional[bool] = None
    stop_loops: Optional[bool] = None
    user: Optional[str] = None
    gate: _Gate = None
    window: _Window = None
    draft_max: _DraftMax = None
    speculative: Optional[bool] = None
    records: Optional[bool] = None


class _Part(RequestBody):
    type: str
    text: Optional[str] = None
    refusal: Optional[str] = None


class _Object(RequestBody):
    prompt_string: Optional[str] = None
    content: Optional[list[_Part]] = Field(None, max_length=2**16, fail_fast=True)
    multimodal_data: Any = None


_Mixed = Annotated[list[Union[_Token, str]], Field(min_length=1, fail_fast=True)]
_Prompt = Union[str, _Tokens, _Mixed, _Object, Annotated[list[Union[str, _Tokens, _Mixed, _Object]], _SOME]]


class _StreamOptions(RequestBody):
    include_usage: Optional[bool] = None


class _JsonSchema(RequestBody):
    schema_: dict[str, Any] = Field(alias="schema")


class _Format(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    schema_: Optional[dict[str, Any]] = Field(None, alias="schema")
    json_schema: Optional[_JsonSchema] = None


class NumberedFields(SharedFields):
    """The fields of routes that give several answers."""

    n: Optional[int] = Field(None, ge=1, le=_INT32)
    max_tokens: Optional[_Limit] = None
    n_predict: Optional[_Limit] = None
    stream_options: Optional[_StreamOptions] = None
    response_format: Optional[_Format] = None

    @property
    def most_tokens(self) -> Optional[int]:
        """The longest answer that is asked for, tokens, -1: no limit; None: it is not said."""
        return self.n_predict if self.max_tokens is None else self.max_tokens


class CompletionRequest(NumberedFields):
    """The body of /v1/completions."""

    prompt: _Prompt
    suffix: Optional[str] = None
    echo: Optional[bool] = None
    logprobs: Optional[int] = Field(None, ge=0, le=20)
    best_of: Optional[int] = Field(None, ge=1, le=_INT32)


class NativeRequest(NumberedFields):
    """The body of /completion."""

    prompt: _Prompt
    n_probs: Optional[int] = Field(None, ge=0, le=20)
    return_tokens: Optional[bool] = None
    response_fields: Optional[list[str]] = Field(None, max_length=64)


class ExtraFields(RequestBody):
    text: str
    filename: Optional[str] = None


class InfillRequest(NativeRequest):
    """The body of /infill."""

    prompt: Optional[str] = None  # type: ignore[assignment]
    input_prefix: str
    input_suffix: str
    input_extra: Optional[list[ExtraFields]] = Field(None, max_length=1024, fail_fast=True)


_Content = Union[str, Annotated[list[_Part], Field(max_length=2**16, fail_fast=True)], None]


class _CalledFunction(RequestBody):
    name: str
    arguments: Union[str, dict[str, Any], None] = None


class _Call(RequestBody):
    function: _CalledFunction
    id: Optional[str] = None
    type: Optional[str] = None


class ChatMessage(RequestBody):
    role: _Role
    content: _Content = None
    name: Optional[str] = None
    tool_call_id: Optional[str] = None
    tool_calls: Optional[list[_Call]] = Field(None, max_length=128, fail_fast=True)
    function_call: Optional[_CalledFunction] = None
    reasoning_content: Optional[str] = None
    refusal: Optional[str] = None


class _Function(RequestBody):
    name: str = Field(min_length=1, max_length=64)
    description: Optional[str] = None
    parameters: Optional[dict[str, Any]] = None
    strict: Optional[bool] = None


class _Tool(RequestBody):
    type: Literal["function"]
    function: _Function


class _Named(RequestBody):
    name: str


class _ToolChoice(RequestBody):
    function: _Named


class _ChoiceObject(RequestBody):
    type: _ChoiceWord


_FUNCTIONS = _only("function", what="functions")
_CHOICES = _only("function", "none", "auto", "required", what="none, auto, required, or a function")


class ThinkingFields(RequestBody):
    """The fields that speak of thoughts."""

    chat_template_kwargs: Optional[dict[str, Any]] = None
    reasoning_budget_tokens: Optional[int] = Field(None, ge=-1, le=_INT32)
    thinking_budget_tokens: Optional[int] = Field(None, ge=-1, le=_INT32)


class ChatRequest(NumberedFields, ThinkingFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], _SOME]
    max_completion_tokens: Optional[_Limit] = None
    add_generation_prompt: Optional[bool] = None
    continue_final_message: Optional[bool] = None
    verbose: Optional[bool] = None
    logprobs: Optional[bool] = None
    top_logprobs: Optional[int] = Field(None, ge=0, le=20)
    tools: Optional[list[Annotated[_Tool, _FUNCTIONS]]] = Field(None, max_length=128, fail_fast=True)
    tool_choice: Annotated[Union[_ChoiceWord, _ToolChoice, _ChoiceObject, None], _CHOICES] = None
    functions: Optional[list[_Function]] = Field(None, max_length=128, fail_fast=True)
    function_call: Union[Literal["none", "auto"], _Named, None] = None
    reasoning_format: Optional[Literal["none", "auto", "deepseek"]] = None
    reasoning_effort: _Effort = None
    modalities: Optional[list[Literal["text"]]] = None
    audio: None = None
    web_search_options: None = None
    parallel_tool_calls: Optional[bool] = None

    @property
    def most_tokens(self) -> Optional[int]:
        """As of other routes; the newest of its three names counts."""
        return super().most_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ResponseItem(RequestBody):
    type: Optional[str] = None
    role: Optional[_Role] = None
    content: _Content = None
    name: Optional[str] = None
    arguments: Optional[str] = None
    call_id: Optional[str] = None
    output: _Content = None


class _NamedFormat(_Format):
    name: Optional[str] = None


class _TextOptions(RequestBody):
    format: Optional[_NamedFormat] = None


class _FlatTool(_Function):
    type: Literal["function"]


class _Reasoning(RequestBody):
    effort: _Effort = None


class ResponseRequest(SharedFields, ThinkingFields):
    """The body of /v1/responses."""

    input: Union[str, Annotated[list[ResponseItem], _SOME]]
    instructions: Optional[str] = None
    max_output_tokens: Optional[int] = Field(None, ge=1, le=_INT32)
    previous_response_id: Optional[str] = None
    reasoning: Optional[_Reasoning] = None
    background: Optional[Literal[False]] = None
    truncation: Optional[Literal["auto", "disabled"]] = None
    conversation: None = None
    prompt: None = None
    text: Optional[_TextOptions] = None
    tools: Optional[list[Annotated[_FlatTool, _FUNCTIONS]]] = Field(None, max_length=128, fail_fast=True)
    tool_choice: Annotated[Union[_ChoiceWord, _Named, _ChoiceObject, None], _CHOICES] = None
    parallel_tool_calls: Optional[bool] = None


class _Block(RequestBody):
    type: str
    text: Optional[str] = None
    thinking: Optional[str] = None
    id: Optional[str] = None
    name: Optional[str] = None
    input: Union[dict[str, Any], str, None] = None
    tool_use_id: Optional[str] = None
    content: _Content = None


_Blocks = Union[str, Annotated[list[_Block], Field(max_length=2**16, fail_fast=True)]]


class AnthropicMessage(RequestBody):
    role: Literal["user", "assistant", "system"]
    content: _Blocks


class _AnthropicTool(RequestBody):
    name: str = Field(min_length=1, max_length=128)
    input_schema: dict[str, Any]
    description: Optional[str] = None
    type: Optional[Literal["custom"]] = None


class _AnthropicChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: Optional[str] = None
    disable_parallel_tool_use: Optional[bool] = None


class _Thinking(RequestBody):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Optional[int] = Field(None, ge=0, le=_INT32)


class _OutputConfig(RequestBody):
    format: Optional[_Format] = None
    effort: Optional[str] = Field(None, max_length=16)


_TOOLS_OF_CLIENTS = _only("custom", what="tools of the client's")


class CountRequest(RequestBody):
    """The body of /v1/messages/count_tokens."""

    messages: Annotated[list[AnthropicMessage], _SOME]
    model: Optional[str] = None
    system: _Content = None
    tools: Optional[list[Annotated[_AnthropicTool, _TOOLS_OF_CLIENTS]]] = Field(None, max_length=128, fail_fast=True)
    tool_choice: Optional[_AnthropicChoice] = None
    thinking: Optional[_Thinking] = None
    output_config: Optional[_OutputConfig] = None


class MessageRequest(CountRequest):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1, le=_INT32)
    stream: Optional[bool] = None
    temperature: Optional[float] = Field(None, ge=0, le=2)
    top_p: _TopP = None
    top_k: _TopK = None
    seed: _Seed = None
    stop_sequences: Optional[list[Annotated[str, _STOP]]] = Field(None, max_length=_MOST_STOPS, fail_fast=True)
    thread: Optional[dict[str, Any]] = None
    metadata: Optional[dict[str, Any]] = None
    gate: _Gate = None
    window: _Window = None
    draft_max: _DraftMax = None
    speculative: Optional[bool] = None


class EmbeddingRequest(RequestBody):
    """The body of /v1/embeddings."""

    input: _Prompt
    model: Optional[str] = None
    user: Optional[str] = None
    encoding_format: Optional[Literal["float", "base64"]] = None
    dimensions: Optional[int] = Field(None, ge=1, le=_INT32)


class TokenizeRequest(RequestBody):
    """The body of /tokenize: `prompt` as lm-eval asks, or `content` as llama.cpp's clients do."""

    prompt: Optional[str] = None
    add_special_tokens: Optional[bool] = None
    content: Optional[str] = None
    add_special: Optional[bool] = None
    parse_special: Optional[bool] = None
    with_pieces: Optional[bool] = None


class DetokenizeRequest(RequestBody):
    """The body of /detokenize."""

    tokens: Annotated[list[_Token], Field(fail_fast=True), BeforeValidator(_all_whole)]


def wanted_call(choice: Union[str, _Named, _ToolChoice, _ChoiceObject, None]) -> Optional[tuple[str, Optional[str]]]:
    """none, auto or required, and the only function that may be called; None if the request leaves it open."""
    if choice is None or isinstance(choice, _ToolChoice):
        return None if choice is None else ("required", choice.function.name)
    if isinstance(choice, _Named):
        return "required", choice.name
    return choice if isinstance(choice, str) else choice.type, None


def read_content(content: Union[str, Sequence[Union[_Part, _Block]], None], path: str) -> str:
    """The text of a message. Raises ApiError: it has something else than text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise bad_request(f"{path} has a part of the type {part.type[:40]!r}; this server takes text.", path)
        refusal = part.refusal if isinstance(part, _Part) else None
        texts.append(part.text or refusal or "")
    return "".join(texts)


def read_object(prompt: _Object, path: str) -> str:
    """The text of a prompt that is an object: its `prompt_string`, or the parts of its `content`. Raises ApiError."""
    if prompt.multimodal_data:
        raise bad_request(f"{path} has multimodal_data; this server takes text.", path)
    if prompt.prompt_string is not None:
        return prompt.prompt_string
    if not prompt.content:
        raise bad_request(f"{path} has neither prompt_string nor content; give one of them.", path)
    return read_content(prompt.content, path)


def listed(prompt: Any) -> list[Any]:
    """A list of prompts, whatever form it had: a list in which a token stands is one prompt."""
    if not isinstance(prompt, list) or not {int, float}.isdisjoint(map(type, prompt)):
        return [prompt]
    return list(prompt)
