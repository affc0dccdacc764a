"""Which of llama.cpp's tests fail here, and why."""

from __future__ import annotations

MODEL = "the other model's tokens"

EXPECTED: dict[str, tuple[str, ...]] = {
    MODEL: (
        "chat_completion::test_chat_completion_cached_tokens", "chat_completion::test_chat_template",
        "chat_completion::test_return_progress[64-4-False]", "completion::test_completion_prompt_cache",
        "completion::test_completion_response_fields[I believe the meaning of life is-32-",
        "ctx_shift::test_ctx_shift_disabled_short_prompt[-1-", "ctx_shift::test_ctx_shift_disabled_long_prompt",
        "compat_anthropic::test_anthropic_vision_base64_with_multimodal_model",
        "compat_anthropic::test_anthropic_thinking_with_reasoning_model[",
        "embedding::test_embedding_pooling_none", "embedding::test_embedding_usage_multiple",
        "speculative::test_slot_ctx_not_exceeded", "tokenize::test_tokenize_with_bos",
    ),
    "`system_fingerprint` names our release and the rule": (
        "chat_completion::test_chat_completion[", "chat_completion::test_chat_completion_stream[",
        "chat_completion::test_chat_completion_with_openai_library", "completion::test_completion_with_openai_library",
    ),
    "a response that its limit has ended is `incomplete`, as OpenAI's are": (
        "compat_oai_responses::test_responses_stream_with_llama_telemetry",
    ),
    "parts of a message are joined without empty lines between them, as other servers do": (
        "chat_completion::test_chat_template_assistant_prefill[prefill1-",
    ),
    "of several names the first one is the model's id": ("basic::test_server_model_aliases_and_tags",),
    "the server listens at one address": ("basic::test_server_multiple_addresses",),
    "no flag takes `/slots`, `/metrics` or the page away": (
        "basic::test_server_slots", "basic::test_no_ui", "metrics::test_metrics_disabled",
    ),
    "metrics have other names": (
        "metrics::test_metrics_prometheus_format", "metrics::test_metrics_prompt_processed_and_cached",
        "metrics::test_metrics_predicted_total_matches_requests", "metrics::test_metrics_embedding_prompt_is_counted",
    ),
    "images are refused with another status, or needed": (
        "compat_anthropic::test_anthropic_vision_format_accepted",
        "compat_anthropic::test_anthropic_tool_result_with_image", "security::test_local_media_file[../../../tools-",
    ),
    "a conversation without messages is refused": ("compat_anthropic::test_anthropic_empty_messages",),
    "web pages of other origins are refused unless `--cors` names them": ("security::test_cors_options[",),
    "there is no router of several models": (
        "security::test_cors_origins_localhost_reflects[", "security::test_cors_origins_localhost_rejects[",
        "security::test_cors_origins_defaults_to_localhost_with_tools_enabled",
    ),
    "there is no proxy for MCP": ("security::test_cors_proxy_only_forwards_explicit_proxy_headers",),
    "the page has other files": ("security::test_access_static_assets_without_api_key",),
    "a full context ends the answer; it does not shift": (
        "ctx_shift::test_ctx_shift_enabled", "speculative::test_with_ctx_shift",
    ),
    "probabilities are those before the sampler": (
        "completion::test_n_probs_post_sampling", "completion::test_n_probs_post_backend_sampling",
    ),
    "the sampler adaptive-p is not served": ("completion::test_completion_stream[",),
    "llama.cpp's made-up drafts": (
        "speculative::test_with_and_without_draft", "speculative::test_synth_is_deterministic",
        "speculative::test_synth_ignores_target_tokens",
    ),
    "a template that takes `functions` as a text": ("template::test_date_inside_prompt[fireworks-",),
    "the suite leaves it out": (
        "completion::test_cache_vs_nocache_prompt", "infill::test_with_qwen_model",
    ),
}  # fmt: skip
"""By reason: how the names of the tests begin; `*` stands for anything."""


def reason_of(name: str) -> str:
    """Why a test is expected to fail; empty: it is to pass."""
    for reason, beginnings in EXPECTED.items():
        for beginning in beginnings:
            first, _, inner = beginning.partition("*")
            if name == beginning or (name.startswith(first) and beginning[-1] in "[-" and inner in name):
                return reason
    return ""
