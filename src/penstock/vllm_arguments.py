"""vLLM's arguments and what becomes of each here: of LLM(...) and every command, of serve,
SamplingParams and calls.

An argument is taken where it asks for what we do anyway, or where it can change no answer; all else
is refused with the sentence that helps. None is left out. docs/coming_from_vllm.md is made from
here. It knows names and values, no engine. Source: vLLM's EngineArgs, cli_args.py, LLM and
SamplingParams, with the older names that scripts still pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from numbers import Real
from typing import Any, TypeVar

from penstock.errors import UsageError

_KINDS: dict[type, str] = {
    dict: "an object",
    bool: "true or false",
    Real: "a number",
    str: "a text",
    object: "any value",
}
LONGEST = 80  # characters of a value that a refusal repeats
ModelT = TypeVar("ModelT")


@dataclass(frozen=True, slots=True)
class As:
    """The value that another argument has."""

    name: str


@dataclass(frozen=True, slots=True)
class Argument:
    """taken: values that ask for what is done anyway, or a type all of whose values change nothing.
    note: why, and the way out. told: all of a flag's values are taken, and who asks for one that
    isn't in `taken` is told the note."""

    taken: tuple[Any, ...] | type
    note: str
    told: bool = False

    @property
    def is_flag(self) -> bool:
        return self.taken is bool or (
            isinstance(self.taken, tuple) and any(isinstance(v, bool) for v in self.taken)
        )

    def takes(self, value: Any, others: Mapping[str, Any]) -> bool:
        """Whether the value asks for what is done anyway. others: the arguments that came with it,
        by name."""
        if isinstance(self.taken, type):
            return isinstance(value, self.taken)
        known = [others.get(v.name) if isinstance(v, As) else v for v in self.taken]
        return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in known)


def named(
    names: str, taken: tuple[Any, ...] | type, note: str, *, told: bool = False
) -> dict[str, Argument]:
    """Returns what is said of these names, parted by spaces: the same of each."""
    return dict.fromkeys(names.split(), Argument(taken, note, told))


# Names that are ours too: the same in both. Of serve's, those that only a server has.
SHARED = (
    "model",
    "revision",
    "dtype",
    "load_format",
    "tokenizer",
    "skip_tokenizer_init",
    "seed",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "quantization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "data_parallel_size",
    "max_cudagraph_capture_size",
)
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
SPELLINGS = {  # vLLM's values of these -> ours
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "quantization": {
        "None": "auto",
        "awq_marlin": "awq",
        "auto_awq": "awq",
        "gptq_marlin": "gptq",
        "auto_gptq": "gptq",
    },
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "tool_call_parser": {"qwen3_xml": "qwen3_coder"},
}

SHORT = {  # vLLM's short options
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-ep": "enable_expert_parallel",
    "-q": "quantization",
    "-O": "optimization_level",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-sc": "speculative_config",
    "-asc": "api_server_count",
}

_CONTEXT = "a context is not cut over GPUs: tensor_parallel_size gives it the memory of several"
_ONE_HOST = (
    "replicas run on one machine: start a server on each, and share requests out in front of them"
)
_PIPELINE = (
    "a model is not cut by layers: data_parallel_size runs whole ones, and quantization='fp8'"
    " halves it"
)
_ADAPTERS = (
    "one adapter is merged into the weights, by lora=DIR (--lora DIR); several at once are not"
    " served"
)
_NOTHING = "belongs to what is not served, or to how vLLM does it; here it changes nothing"
_CODE = "code from outside is not run in the engine"
_GUIDED = "llguidance makes all masks; a request says the rest in structured_outputs"
_FORM = (
    "say SamplingParams(structured_outputs=StructuredOutputsParams(json=..., regex=...,"
    " choice=...))"
)
_TEMPLATE = (
    "a template is the engine's: say chat_template=FILE (--chat-template FILE) when it starts"
)
_OVERRIDE = "config.json is read as it stands: change it in a copy of the folder"
_GENERATES = "models generate text here; they don't embed, classify or score"
_KERNELS = "the machine decides on kernels: `penstock doctor` says which and why"
_GRAPHS = "steps are captured and compiled ahead as they are"
_SCHEDULER = (
    "the scheduler has no such thing: max_num_seqs and max_num_batched_tokens say how much runs at"
    " once"
)
_OWN_SCHEDULER = "belongs to vLLM's scheduler; no answer depends on it"
_OFFLOAD = "weights and KV stay on the device: max_model_len and max_num_seqs make them smaller"
_BETWEEN = "neither KV nor weights travel between engines"
_CONTENT = "whether a template takes text or parts is found by asking it: leave it out"
_REASONING = "how long a model thinks is its template's: say chat_template_kwargs in a request"
_LOGS = "requests are logged by `--access-log` alone, without prompts"
_TRACES = "no traces are sent: /metrics and `--access-log` tell of requests"
_METRICS = "/metrics has what it has, without a switch"
_DRAFTS = "no tokens are drafted ahead so far: leave it out, answers are the same"

ENGINE: dict[str, Argument] = {
    **named("pipeline_parallel_size", (1,), _PIPELINE),
    **named("prefill_context_parallel_size decode_context_parallel_size", (1,), _CONTEXT),
    **named("nnodes", (1,), _ONE_HOST),
    **named("data_parallel_size_local", (As("data_parallel_size"),), _ONE_HOST),
    **named("node_rank data_parallel_rank data_parallel_start_rank", (0,), _ONE_HOST),
    **named("distributed_executor_backend", ("mp", "uni"), _ONE_HOST),
    **named("data_parallel_backend", ("mp",), _ONE_HOST),
    **named(
        "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb"
        " enable_elastic_ep ray_workers_use_nsight",
        (False,),
        _ONE_HOST,
    ),
    **named(
        "numa_bind",
        (False,),
        "a replica is pinned to the cores of its GPU as it is; else start it under numactl",
    ),
    **named("numa_bind_nodes numa_bind_cpus", (), "start it under numactl"),
    **named(
        "enable_return_routed_experts",
        (False,),
        "the router's choices are not given back: leave it out",
    ),
    # what the model is
    **named("trust_remote_code", (False,), "no code of a model ever runs here", told=True),
    **named("code_revision", str, "no code of a model ever runs here"),
    **named("hf_config_path", (As("model"),), "it is the model folder's own: put the files there"),
    **named("tokenizer_revision", (As("revision"),), "the tokenizer is of the model's revision"),
    **named("tokenizer_mode", ("auto", "hf"), "tokenizers are read from tokenizer.json"),
    **named("tokenizer_pool_size", (0,), "one thread tokenises"),
    **named("task runner", ("auto", "generate"), _GENERATES),
    **named("convert", ("auto", "none"), _GENERATES),
    **named("pooler_config override_pooler_config", (), _GENERATES),
    **named("model_impl", ("auto", "vllm"), "models are run by our own code, not by transformers'"),
    **named("config_format", ("auto", "hf"), "config.json is in Hugging Face's form"),
    **named("hf_overrides rope_scaling", ({},), _OVERRIDE),
    **named("rope_theta override_attention_dtype", (), _OVERRIDE),
    **named("model_weights", ("",), "weights are in the model's folder"),
    **named(
        "hf_token",
        (),
        "the hub's client reads HF_TOKEN, or what `hf auth login` stored: leave it out",
    ),
    **named("download_dir", (), "the hub's cache lies where HF_HOME or HF_HUB_CACHE says"),
    **named(
        "ignore_patterns", (["original/**/*"],), "safetensors, JSON and templates alone are fetched"
    ),
    **named("model_loader_extra_config", ({},), "safetensors are read without further settings"),
    **named("quantization_config", (), "the checkpoint's own config.json says it"),
    **named(
        "allow_deprecated_quantization calculate_kv_scales",
        (False,),
        "scales are found without being asked for",
    ),
    **named("kv_cache_dtype_skip_layers", ([],), "keys that must stay wide are found at the start"),
    **named(
        "generation_config",
        ("auto",),
        "over HTTP the model's generation_config.json gives defaults",
    ),
    **named("override_generation_config", ({},), "say it in requests, or in SamplingParams"),
    **named(
        "enable_lora enable_lora_bias enable_prompt_adapter enable_tower_connector_lora",
        (False,),
        _ADAPTERS,
    ),
    **named("default_mm_loras", (), _ADAPTERS),
    **named(
        "enable_mm_embeds mm_encoder_only enable_prompt_embeds",
        (False,),
        "prompts are text or token ids",
    ),
    **named("io_processor_plugin logits_processor_pattern scheduler_cls", (), _CODE),
    **named("worker_cls worker_extension_cls", ("auto", ""), _CODE),
    **named("logits_processors", ([],), f"{_CODE}: use a request's logit_bias"),
    # how it runs
    **named(
        "enforce_eager",
        (False,),
        "CUDA graphs run where they save time; no answer depends on it",
        told=True,
    ),
    **named("cudagraph_capture_sizes cuda_graph_sizes", (), f"{_GRAPHS}: leave it out"),
    **named("compilation_config additional_config", ({},), f"{_GRAPHS}: leave it out"),
    **named(
        "attention_backend attention_config kernel_config ir_op_priority gdn_prefill_backend",
        (),
        _KERNELS,
    ),
    **named("enable_flashinfer_autotune", bool, "nothing is tuned behind the start"),
    **named("block_size", (16,), "a block has 16 tokens"),
    **named(
        "num_gpu_blocks_override kv_cache_memory_bytes", (), "kv_cache_tokens says it in tokens"
    ),
    **named(
        "prefix_caching_hash_algo",
        str,
        "what the cache finds is compared token for token, whatever the hash",
    ),
    **named("swap_space", Real, "what is preempted is computed again; nothing is swapped"),
    **named("cpu_offload_gb offload_group_size kv_offloading_size", (0,), _OFFLOAD),
    **named("cpu_offload_params offload_params", (), _OFFLOAD),
    **named(
        "enable_chunked_prefill",
        (True,),
        "prompts are read in chunks; no answer depends on it",
        told=True,
    ),
    **named(
        "async_scheduling",
        (True,),
        "a step starts before the last is read; steps_ahead=0 reads each",
        told=True,
    ),
    **named(
        "disable_cascade_attn",
        (False,),
        "prefix_groups='off' attends each row by itself",
        told=True,
    ),
    **named("disable_sliding_window", (False,), "lower max_model_len to stay within the window"),
    **named(
        "max_num_partial_prefills max_long_partial_prefills num_scheduler_steps stream_interval",
        (1,),
        _SCHEDULER,
    ),
    **named(
        "long_prefill_token_threshold scheduler_delay_factor num_lookahead_slots", (0,), _SCHEDULER
    ),
    **named("kv_sharing_fast_prefill", (False,), _SCHEDULER),
    **named(
        "scheduling_policy",
        ("fcfs",),
        "requests have one priority; between API keys the line is fair",
    ),
    **named("preemption_mode", str, _OWN_SCHEDULER),
    **named(
        "speculative_config speculative_model num_speculative_tokens ngram_prompt_lookup_max",
        (),
        _DRAFTS,
    ),
    **named(
        "kv_transfer_config kv_events_config ec_transfer_config weight_transfer_config",
        (),
        _BETWEEN,
    ),
    **named("enable_sleep_mode", bool, "every engine can sleep"),
    # what it says
    **named("max_logprobs", (20,), "a request may ask for up to 20"),
    **named("logprobs_mode", ("raw_logprobs",), "logprobs are of the raw logits"),
    **named("structured_outputs_config", dict, f"its disable_any_whitespace is read; {_GUIDED}"),
    **named("guided_decoding_backend", str, _GUIDED),
    **named("guided_decoding_disable_fallback", bool, _GUIDED),
    **named("guided_decoding_disable_any_whitespace", bool, "it is our disable_any_whitespace"),
    **named(
        "guided_decoding_disable_additional_properties",
        (False,),
        "say additionalProperties: false in the schema",
    ),
    **named(
        "reasoning_parser", (), "`penstock serve` has it; here reasoning is in the answer's text"
    ),
    **named("reasoning_config", (), _REASONING),
    **named("reasoning_parser_plugin", ("",), _CODE),
    **named("enable_reasoning", bool, "an older switch: `serve --reasoning-parser` alone says it"),
    **named(
        "disable_log_stats",
        bool,
        "no lines of statistics are written: stats() and /metrics have them",
    ),
    **named("disable_log_requests", bool, _LOGS),
    **named(
        "enable_log_requests aggregate_engine_logging enable_logging_iteration_details",
        (False,),
        _LOGS,
    ),
    **named("otlp_traces_endpoint collect_detailed_traces", (), _TRACES),
    **named("enable_layerwise_nvtx_tracing", (False,), _TRACES),
    **named("kv_cache_metrics cudagraph_metrics", (False,), _METRICS),
    **named(
        "enable_mfu_metrics",
        bool,
        "/metrics says how near to the hardware's limit steps come, where it is known",
    ),
    **named("profiler_config", ({},), "benchmarks/shapes.py says what the parts of a step take"),
    **named(
        "renderer_num_workers", (1,), "long texts are tokenised beside the server's loop as it is"
    ),
    **named("served_model_name shutdown_timeout", object, "belongs to a server"),
    **named("tokens_only", (False,), "skip_tokenizer_init serves token ids alone"),
    # what belongs to something that isn't served, or to how vLLM does it
    **named(
        "master_addr master_port distributed_timeout_seconds data_parallel_address"
        " data_parallel_rpc_port dcp_comm_backend dcp_kv_cache_interleave_size"
        " cp_kv_cache_interleave_size max_parallel_loading_workers moe_backend all2all_backend"
        " expert_placement_strategy eplb_config ubatch_size dbo_decode_token_threshold"
        " dbo_prefill_token_threshold max_loras max_lora_rank max_cpu_loras lora_dtype"
        " lora_target_modules lora_extra_vocab_size long_lora_scaling_factors max_prompt_adapters"
        " max_prompt_adapter_token limit_mm_per_prompt mm_processor_kwargs media_io_kwargs"
        " mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb"
        " mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype"
        " mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"
        " mm_tensor_ipc video_pruning_rate allowed_local_media_path allowed_media_domains"
        " safetensors_load_strategy pt_load_map_location mamba_config mamba_cache_dtype"
        " mamba_block_size mamba_cache_mode mamba_backend mamba_cache_philox_rounds"
        " max_seq_len_to_capture optimization_level performance_mode kv_cache_metrics_sample"
        " show_hidden_metrics_for_version tokenizer_pool_type tokenizer_pool_extra_config"
        " offload_backend offload_num_in_group offload_prefetch_step kv_offloading_backend",
        object,
        _NOTHING,
    ),
    **named(
        "disable_custom_all_reduce disable_nccl_for_dp_synchronization enable_expert_parallel"
        " enable_eplb enable_ep_weight_filter enable_dbo fully_sharded_loras specialize_active_lora"
        " language_model_only disable_mm_preprocessor_cache interleave_mm_strings skip_mm_profiling"
        " disable_chunked_mm_input enable_mm_processor_stats"
        " enable_multimodal_encoder_data_parallel use_tqdm_on_load multi_step_stream_outputs"
        " disable_async_output_proc use_v2_block_manager scheduler_reserve_full_isl"
        " disable_hybrid_kv_cache_manager enable_mamba_cache_stochastic_rounding"
        " fail_on_environ_validation",
        bool,
        _NOTHING,
    ),
}

SERVE: dict[str, Argument] = {
    **named("lora_modules prompt_adapters", (), _ADAPTERS),
    **named("chat_template_content_format", ("auto",), _CONTENT),
    **named("trust_request_chat_template", (False,), _TEMPLATE),
    **named("default_chat_template_kwargs", ({},), "say chat_template_kwargs in each request"),
    **named("response_role", ("assistant",), "answers are the assistant's"),
    **named("return_tokens_as_token_ids", (False,), "say return_tokens_as_token_ids in a request"),
    **named("tool_server", (), "tools are run by the client"),
    **named("tool_parser_plugin", ("",), _CODE),
    **named(
        "exclude_tools_when_tool_choice_none",
        (False,),
        "leave tools out of requests that may not call them",
    ),
    **named("log_config_file", (), _LOGS),
    **named("enable_log_outputs log_error_stack", (False,), _LOGS),
    **named("enable_log_deltas disable_uvicorn_access_log", bool, _LOGS),
    **named("max_log_len uvicorn_log_level", object, _LOGS),
    **named("disable_access_log_for_endpoints", (), f"{_LOGS}: filter its lines by path"),
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

STRUCTURED: dict[str, Argument] = {  # the keys of structured_outputs_config
    **named("backend", str, _GUIDED),
    **named("disable_fallback disable_any_whitespace", bool, _GUIDED),
    **named(
        "disable_additional_properties", (False,), "say additionalProperties: false in the schema"
    ),
    **named(
        "reasoning_parser reasoning_parser_plugin",
        ("",),
        "say reasoning_parser of `penstock serve`",
    ),
    **named("enable_in_reasoning", (False,), "a form is of the answer behind the reasoning"),
}

SAMPLING: dict[str, Argument] = {
    **named("best_of", (As("n"),), "samples are not ranked: ask for n, and choose on your side"),
    **named(
        "use_beam_search early_stopping", (False,), "there is no beam search: ask for n samples"
    ),
    **named(
        "length_penalty", (1,), "it belongs to beam search, which there is none of: leave it out"
    ),
    **named("guided_decoding", (), _FORM),
    **named("logits_processors", ([],), f"{_CODE}: use logit_bias"),
    **named("extra_args", ({},), f"{_CODE}: nobody would read them"),
    **named(
        "truncate_prompt_tokens", (-1,), "cut the token ids yourself, and give them as the prompt"
    ),
    **named("spaces_between_special_tokens", (True,), "special tokens are always spelt apart"),
    **named(
        "flat_logprobs",
        (False,),
        "logprobs are columns until they are looked at, and read as a list of dicts",
    ),
    **named("skip_reading_prefix_cache", (False,), "enable_prefix_caching=False keeps nothing"),
    **named("prompt_logprob_token_ids", (), "prompt_logprobs gives the 20 most likely"),
    **named("prompt_logprob_start routed_experts_prompt_start", (0,), "prompts are told whole"),
    **named("thinking_token_budget", (-1,), _REASONING),
    **named(
        "repetition_detection trace_decode_token_ids",
        (),
        "samples end at stop strings, stop ids and max_tokens",
    ),
    **named("stream_interval", (1,), "outputs come whole, from stream() one by one: leave it out"),
    **named("skip_clone", bool, "parameters are only read"),
}

CALL: dict[str, Argument] = {  # of LLM.generate and LLM.chat
    **named("lora_request prompt_adapter_request", (), _ADAPTERS),
    **named("priority", (0, []), "requests have one priority"),
    **named(
        "tokenization_kwargs",
        ({},),
        "encode the text yourself (get_tokenizer), and give token ids as the prompt",
    ),
    **named("guided_options_request", (), _FORM),
    **named("chat_template", (), _TEMPLATE),
    **named("chat_template_content_format", ("auto",), _CONTENT),
    **named("tools", ([],), "`LLM.chat` takes them, for the model's template"),
    **named("mm_processor_kwargs", object, _NOTHING),
}


def spelt(argument: Argument) -> str:
    """The values that are taken, in words."""
    if isinstance(argument.taken, type):
        return _KINDS[argument.taken]
    return " or ".join(
        f"the same as {v.name}" if isinstance(v, As) else repr(v) for v in argument.taken
    )


def sift(
    given: Mapping[str, Any],
    table: Mapping[str, Argument],
    usual: Mapping[str, Any] | None = None,
    shown: Callable[[str, Any], str] = "{}={!r}".format,
) -> tuple[dict[str, Any], list[str]]:
    """What of `given` is not vLLM's alone, and what has to be told. Raises UsageError for a value
    that isn't taken.

    usual: values of what wasn't given.   shown: an argument with its value, as they were typed.
    """
    others, told = {**(usual or {}), **given}, []
    for name, value in given.items():
        argument = table.get(name)
        if argument is None or value is None or argument.takes(value, others):
            continue
        said, flag = shown(name, value), isinstance(value, bool)
        if len(said) > LONGEST:
            said = said[: LONGEST - 3] + "..."
        if not (argument.told and flag):
            which = (
                ""
                if not argument.taken or (argument.is_flag and flag)
                else f" (only {spelt(argument)})"
            )
            raise UsageError(f"{said} is not served{which}: {argument.note}", param=name)
        told.append(f"{said} changes nothing: {argument.note}")
    return {name: value for name, value in given.items() if name not in table}, told


def engine_knobs(model: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The knobs of what LLM was given, spelt as we do, and what has to be told. None is left out,
    as vLLM's is."""
    left, told = sift({**given, "model": model}, ENGINE)
    return {
        name: ours(name, value)
        for name, value in {**left, **meant(given)}.items()
        if value is not None
    }, told


def meant(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the knobs of ours that vLLM's arguments say by other names. Raises UsageError for a
    key of structured_outputs_config that asks for what isn't done."""
    config = given.get("structured_outputs_config") or {}
    sift(
        config, STRUCTURED, shown=lambda name, value: f"structured_outputs_config.{name} {value!r}"
    )
    unknown = sorted(config.keys() - STRUCTURED.keys())
    if unknown:
        rule = f"structured_outputs_config has no {unknown[0]!r}: leave it out"
        raise UsageError(rule, param="structured_outputs_config")
    says = given.get("guided_decoding_disable_any_whitespace") or config.get(
        "disable_any_whitespace"
    )
    return {"disable_any_whitespace": True} if says else {}


def ours(name: str, value: Any) -> Any:
    """The value of a knob as we spell it: `half` is `float16`; a dtype of torch's is its name."""
    plain = str(value).removeprefix("torch.") if name == "dtype" else value
    return SPELLINGS.get(name, {}).get(plain, plain) if isinstance(plain, str) else value


def takes_vllms(params: type[ModelT]) -> type[ModelT]:
    """Decorates SamplingParams: those arguments that only vLLM's has are checked, and go no
    further."""
    plain, usual = params.__init__, {field.name: field.default for field in fields(params)}  # type: ignore[arg-type]

    @wraps(plain)
    def init(self: ModelT, **given: Any) -> None:
        if not given.keys() <= usual.keys():
            given, _ = sift(given, SAMPLING, usual)
        plain(self, **given)

    params.__init__ = init  # type: ignore[method-assign, assignment]
    return params


def check_call(method: str, given: Mapping[str, Any]) -> None:
    """Raises UsageError for an argument of generate or chat that isn't taken."""
    left, _ = sift(given, CALL)
    if left:
        raise UsageError(
            f"{method} takes no argument {next(iter(left))!r}: docs/llm.md has those that it takes"
        )
