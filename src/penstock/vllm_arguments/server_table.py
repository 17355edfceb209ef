"""Table of vLLM's server arguments. It has Penstock's treatment of each."""

from __future__ import annotations

from numbers import Real

from penstock.vllm_arguments.argument import Argument, named
from penstock.vllm_arguments.reasons import ADAPTERS, CODE, CONTENT, LOGS, TEMPLATE

SHARED_SERVE = (
    "host",
    "port",
    "served_model_name",
    "api_key",
    "api_server_count",
    "shutdown_timeout",
    "max_num_queued_reqs",
    "chat_template",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "ssl_certfile",
    "ssl_keyfile",
)
SERVE: dict[str, Argument] = {
    **named("lora_modules prompt_adapters", (), ADAPTERS),
    **named("chat_template_content_format", ("auto",), CONTENT),
    **named("trust_request_chat_template", (False,), TEMPLATE),
    **named("default_chat_template_kwargs", ({},), "say chat_template_kwargs in each request"),
    **named("response_role", ("assistant",), "answers are the assistant's"),
    **named("return_tokens_as_token_ids", (False,), "say return_tokens_as_token_ids in a request"),
    **named("tool_server", (), "tools are run by the client"),
    **named("tool_parser_plugin", ("",), CODE),
    **named(
        "exclude_tools_when_tool_choice_none",
        (False,),
        "leave tools out of requests that may not call them",
    ),
    **named("log_config_file", (), LOGS),
    **named("enable_log_outputs log_error_stack", (False,), LOGS),
    **named("enable_log_deltas disable_uvicorn_access_log", bool, LOGS),
    **named("max_log_len uvicorn_log_level", object, LOGS),
    **named("disable_access_log_for_endpoints", (), f"{LOGS}: filter its lines by path"),
    **named("enable_prompt_tokens_details", bool, "usage always has prompt_tokens_details"),
    **named("enable_request_id_headers", bool, "answers always have x-request-id"),
    **named(
        "enable_force_include_usage",
        (False,),
        "a stream's request asks for it: stream_options.include_usage",
    ),
    **named(
        "enable_per_request_metrics enable_server_load_tracking",
        (False,),
        "/metrics tells of load and times",
    ),
    **named(
        "enable_tokenizer_info_endpoint enable_offline_docs",
        (False,),
        "/openapi.json lists what there is",
    ),
    **named(
        "disable_fastapi_docs", bool, "there are no such pages; /openapi.json lists what there is"
    ),
    **named("fingerprint_mode", ("none",), "answers have no system_fingerprint"),
    **named("fingerprint_value", (), "answers have no system_fingerprint"),
    **named("uds", (), "it listens on --host and --port"),
    **named("allow_credentials", (False,), "no cookies are read: pages send a key"),
    **named("allowed_origins", (), "say --allowed-origin, again for each page's site"),
    **named(
        "allowed_methods allowed_headers", (["*"],), "pages of allowed origins may send them all"
    ),
    **named(
        "ssl_ca_certs ssl_ciphers",
        (),
        "clients show no certificate, and ciphers are the TLS library's own",
    ),
    **named("enable_ssl_refresh", bool, "a certificate that changes is read again as it is"),
    **named("ssl_cert_reqs", (0,), "clients show no certificate"),
    **named(
        "root_path", ("",), "paths begin with /v1: let the gateway in front cut what stands before"
    ),
    **named("middleware", (), "code from outside is not run in the server: put a gateway in front"),
    **named(
        "h11_max_incomplete_event_size h11_max_header_count",
        Real,
        "heads and bodies have bounds of our own",
    ),
    **named("headless grpc enable_flash_late_interaction", (False,), "it serves OpenAI's HTTP API"),
    **named("config", (), "options stand on the command line"),
    **named("disable_frontend_multiprocessing", bool, "the engine is a process of its own"),
    **named("cohere_is_reasoning_model", bool, "only OpenAI's API is served"),
    **named("cohere_format", str, "only OpenAI's API is served"),
}
