"""Packages that speak to `pyfly-cpp serve`, each as its users do: it chats, streams, calls a function, and asks for an
answer by a schema (`pytest -m clients`; docs/design/serving.md has the command that installs them).

The model is tiny and writes nonsense, so calls are required, and schemas leave only a few values.
"""

# No `from __future__ import annotations`: clients make schemas of the annotations of functions.

import asyncio
import json
from typing import Literal

import pytest
from pydantic import BaseModel
from serving import command, url_of

pytestmark = pytest.mark.clients

QUESTION = "Tom has 3 apples and 4 pears. How many fruits?"
MESSAGES = [{"role": "user", "content": QUESTION}]
PARAMETERS = {
    "type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}}, "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}


class Total(BaseModel):
    """A total."""

    total: Literal[3, 4]


def add(a: Literal[1, 2], b: Literal[3]) -> int:
    """Adds."""
    return a + b


@pytest.fixture(scope="module")
def url(tiny_target, tiny_draft):
    """The address of a server with drafts."""
    process = command(tiny_target, "--draft", tiny_draft, "--no-adaptive", "--parallel", "4", "-c", "2048")
    yield url_of(process)
    process.kill()
    process.wait()


@pytest.fixture
def base(url):
    """The address that clients of OpenAI's protocol are given."""
    return f"{url}/v1"


def needed(module, package=None):
    """A client, or a skip."""
    return pytest.importorskip(module, reason=f"{package or module} is not installed")


# ---- The protocols' own clients --------------------------------------------------------------------------------------


@pytest.fixture
def openai_client(base):
    return needed("openai").OpenAI(base_url=base, api_key="none", max_retries=0)


def test_openai_chats(openai_client):
    options = {"model": "any", "messages": MESSAGES, "max_tokens": 200}
    assert openai_client.chat.completions.create(**options).choices[0].message.content
    with openai_client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        whole = stream.get_final_completion()
    assert "".join(deltas) == whole.choices[0].message.content and len(deltas) > 5
    assert whole.usage.completion_tokens <= 200
    parsed = openai_client.chat.completions.parse(**options, response_format=Total)
    assert parsed.choices[0].message.parsed.total in (3, 4)
    answer = openai_client.responses.parse(model="any", input=QUESTION, text_format=Total, max_output_tokens=200)
    assert answer.output_parsed.total in (3, 4)


def test_openai_calls(openai_client):
    tool = needed("openai").pydantic_function_tool(Total)
    options = {"model": "any", "messages": MESSAGES, "tools": [tool], "tool_choice": "required", "max_tokens": 200}
    with openai_client.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert kinds.count("tool_calls.function.arguments.delta") > 3  # as they are written
    assert call.function.parsed_arguments.total in (3, 4)
    flat = {"type": "function", **tool["function"]}
    with openai_client.responses.stream(model="any", input=QUESTION, tools=[flat], tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        (item,) = stream.get_final_response().output
    assert kinds.count("response.function_call_arguments.delta") > 3 and json.loads(item.arguments)["total"] in (3, 4)


def test_openai_calls_several_at_once(openai_client):
    options = {"model": "any", "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "temperature": 1.0}
    for seed in range(20):  # how many calls it makes is the model's affair
        with openai_client.chat.completions.stream(
            **options, parallel_tool_calls=True, seed=seed, max_tokens=400
        ) as stream:
            choice = [event.snapshot for event in stream if event.type == "chunk"][-1].choices[0]
        calls = choice.message.tool_calls
        if len(calls) > 1 and choice.finish_reason == "tool_calls":
            break
    assert len({call.id for call in calls}) == len(calls) > 1
    assert all(json.loads(call.function.arguments)["b"] == 3 for call in calls)


def test_anthropic(url):
    anthropic = needed("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    options = {"model": "any", "messages": MESSAGES, "max_tokens": 200}
    whole = client.messages.create(**options)
    n_prompt = whole.usage.input_tokens + whole.usage.cache_read_input_tokens  # earlier tests may have asked the same
    assert client.messages.count_tokens(model="any", messages=MESSAGES).input_tokens == n_prompt
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == stream.get_final_message().content[0].text
    assert client.messages.parse(**options, output_format=Total).parsed_output.total in (3, 4)
    tool = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
    with client.messages.stream(**options, tools=[tool], tool_choice={"type": "any"}) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_message().content
    assert kinds.count("input_json") > 1 and call.input in ({"a": 1, "b": 3}, {"a": 2, "b": 3})
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**{**options, "max_tokens": 0})


def test_the_loop_of_anthropic(url):
    anthropic = needed("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    added = []

    @anthropic.beta_tool(input_schema=PARAMETERS)
    def add(a: int, b: int) -> str:
        """Adds."""
        added.append((a, b))
        return str(a + b)

    runner = client.beta.messages.tool_runner(
        model="any", messages=MESSAGES, max_tokens=100, tools=[add], tool_choice={"type": "any"}, max_iterations=3
    )
    assert [message.stop_reason for message in runner] == ["tool_use"] * 3 and len(added) >= 2


# ---- Clients of OpenAI's protocol ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(base, kind):
    agents = needed("agents", "openai-agents")
    agents.set_tracing_disabled(True)
    model = getattr(agents, kind)("any", needed("openai").AsyncOpenAI(base_url=base, api_key="none", max_retries=0))
    added = []

    @agents.function_tool(name_override="add")
    def counted(a: Literal[1, 2], b: Literal[3]) -> int:
        """Adds."""
        added.append((a, b))
        return a + b

    def agent(**more):
        # With a stop, since a response that its limit ends is an error here.
        settings = {"max_tokens": 400, "extra_body": {"stop": [".", "=", " is"]}, **more.pop("settings", {})}
        return agents.Agent("it", instructions="Be short.", model=model, **more,
                            model_settings=agents.ModelSettings(**settings))  # fmt: skip

    async def streamed(one):
        run = agents.Runner.run_streamed(one, QUESTION)
        events = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
        return run.final_output, events

    async def work():
        text, events = await streamed(agent())
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
        assert (await agents.Runner.run(agent(output_type=Total), QUESTION)).final_output.total in (3, 4)
        calling = agent(tools=[counted], settings={"tool_choice": "required"})
        assert (await agents.Runner.run(calling, QUESTION)).final_output and len(added) == 1
        text, events = await streamed(calling)
        assert text and len(added) == 2
        assert sum(event.type == "response.function_call_arguments.delta" for event in events) > 3

    asyncio.run(work())


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(base, kind):
    needed("pydantic_ai", "pydantic-ai-slim[openai]")
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    needed("openai")
    model = getattr(models, kind)("any", provider=OpenAIProvider(base_url=base, api_key="none"))
    settings = {"max_tokens": 200, "temperature": 0.0}

    async def streamed(agent):
        async with agent.run_stream(QUESTION) as run:
            text = "".join([part async for part in run.stream_text(delta=True, debounce_by=None)])
            return text, await run.get_output()

    text, output = asyncio.run(streamed(Agent(model, model_settings=settings)))
    assert text == output and text
    assert Agent(model, output_type=Total, model_settings=settings).run_sync(QUESTION).output.total in (3, 4)
    # A format beside functions: the answer may still be a call.
    agent = Agent(model, output_type=NativeOutput(Total), model_settings=settings)
    added = []

    async def at_first(context, definition):
        return definition if context.run_step == 1 else None

    @agent.tool_plain(name="add", prepare=at_first)
    def counted(a: Literal[1, 2], b: Literal[3]) -> int:
        """Adds."""
        added.append((a, b))
        return a + b

    assert agent.run_sync(QUESTION).output.total in (3, 4) and len(added) == 1

    async def streamed_object():
        async with agent.run_stream(QUESTION) as run:
            return [part async for part in run.stream_output(debounce_by=None)][-1]

    assert asyncio.run(streamed_object()).total in (3, 4) and len(added) == 2


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm(url, provider, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = needed("litellm")
    address = url if provider == "anthropic" else f"{url}/v1"
    model = {"model": f"{provider}/any", "api_base": address, "api_key": "none", "messages": MESSAGES}

    def both(**options):
        """An answer, whole and streamed."""
        chunks = list(litellm.completion(**model, **options, stream=True))
        return litellm.completion(**model, **options).choices[0], litellm.stream_chunk_builder(chunks).choices[0]

    for choice in both(max_tokens=40):
        assert choice.message.content and choice.finish_reason == "length"
    for choice in both(max_tokens=100, tools=[TOOL], tool_choice="required"):
        (call,) = choice.message.tool_calls
        assert call.function.name == "add" and json.loads(call.function.arguments)["b"] == 3
        assert choice.finish_reason == "tool_calls"
    (whole, streamed) = both(max_tokens=200, response_format=Total)
    for choice in (whole, streamed):
        assert Total.model_validate_json(choice.message.content)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**model, max_tokens=40, temperature=1000)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(base, responses):
    needed("langchain_openai", "langchain-openai")
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="any", base_url=base, api_key="none", max_retries=0, temperature=0, max_tokens=200,
                       use_responses_api=responses)  # fmt: skip
    assert model.invoke(QUESTION).text
    chunks = list(model.stream(QUESTION))
    assert len(chunks) > 5 and any(chunk.text for chunk in chunks)
    for method in ("json_schema", "function_calling"):
        assert model.with_structured_output(Total, method=method).invoke(QUESTION).total in (3, 4)
    assert list(model.with_structured_output(Total).stream(QUESTION))[-1].total in (3, 4)
    calling = model.bind_tools([tool(add)], tool_choice="required")
    message = calling.invoke(QUESTION)
    assert message.tool_calls[0]["args"]["b"] == 3
    chunks = list(calling.stream(QUESTION))
    assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 3
    history = [HumanMessage(QUESTION), message, tool(add).invoke(message.tool_calls[0])]
    assert model.bind_tools([tool(add)], tool_choice="none").invoke(history).text


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(openai_client, mode):
    instructor = needed("instructor")
    client = instructor.from_openai(openai_client, mode=instructor.Mode[mode]).chat.completions
    options = {"model": "any", "messages": MESSAGES, "response_model": Total, "max_tokens": 400, "max_retries": 0}
    assert client.create(**options).total in (3, 4)
    parts = list(client.create_partial(**options))
    assert parts[0].total is None and parts[-1].total in (3, 4)
    assert all(one.total in (3, 4) for one in client.create_iterable(**options))


def test_llm(base, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    described = {"model_name": "any", "api_base": base}
    models = [
        {"model_id": "here", **described, "supports_tools": True, "supports_schema": True},
        {"model_id": "here-text", **described, "completion": True},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    llm = needed("llm")
    model = llm.get_model("here")
    model.key = "none"
    for stream in (True, False):
        answer = model.prompt(QUESTION, max_tokens=40, stream=stream)
        assert answer.text() and answer.usage().output == 40
    assert Total.model_validate_json(model.prompt(QUESTION, schema=Total, max_tokens=200).text())
    tool = llm.Tool("add", "Adds.", PARAMETERS, implementation=add)
    for stream in (True, False):  # with a schema as well, the answer is by it or a call, and this model rather calls
        talk = model.conversation()
        answer = talk.prompt(QUESTION, schema=Total, tools=[tool], max_tokens=100, stream=stream)
        results = answer.execute_tool_calls()
        assert [result.output for result in results] in (["4"], ["5"])
        assert talk.prompt("", tool_results=results, max_tokens=40, stream=stream).text()
    assert llm.get_model("here-text").prompt("The", key="none", max_tokens=10).text()


def test_llama_index(base):
    needed("llama_index.llms.openai_like", "llama-index-llms-openai-like")
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def model(**more):
        return OpenAILike(model="any", api_base=base, api_key="none", is_chat_model=True, max_tokens=200, max_retries=0,
                          context_window=2048, temperature=0.0, **more)  # fmt: skip

    chat, messages = model(is_function_calling_model=True), [ChatMessage(QUESTION)]
    assert chat.chat(messages).message.content
    parts = list(chat.stream_chat(messages))
    assert "".join(part.delta for part in parts) == parts[-1].message.content and len(parts) > 5
    tool = FunctionTool.from_defaults(add)
    for options in ({}, {"allow_parallel_tool_calls": True}):
        calls = chat.get_tool_calls_from_response(chat.chat_with_tools([tool], QUESTION, tool_required=True, **options))
        assert calls and all(call.tool_kwargs["b"] == 3 for call in calls)
    parts = list(chat.stream_chat_with_tools([tool], QUESTION, tool_required=True))
    assert chat.get_tool_calls_from_response(parts[-1])[0].tool_kwargs["b"] == 3 and len(parts) > 3
    assert chat.predict_and_call([tool], QUESTION, tool_required=True).response in ("4", "5")
    assert chat.as_structured_llm(Total).complete(QUESTION).raw.total in (3, 4)
    native = model(should_use_structured_outputs=True).as_structured_llm(Total)
    assert native.complete(QUESTION).raw.total in (3, 4)
    assert list(native.stream_chat(messages))[-1].raw.total in (3, 4)
