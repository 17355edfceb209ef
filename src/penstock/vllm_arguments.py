"""vLLM's arguments and what becomes of each here: of LLM(...) and every command, of serve, SamplingParams and calls.

An argument is taken where it asks for what we do anyway, or where it can change no answer; all else is refused with the
sentence that helps. None is left out. docs/coming_from_vllm.md is made from here. It knows names and values, no engine.
Source: vLLM's EngineArgs, cli_args.py, LLM and SamplingParams, with the older names that scripts still pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import wraps
from numbers import Real
from typing import Any, TypeVar

from penstock.errors import UsageError

_KINDS: dict[type, str] = {bool: "true or false", Real: "a number", str: "a text", object: "any value"}
LONGEST = 80  # characters of a value that a refusal repeats
ModelT = TypeVar("ModelT")


@dataclass(frozen=True, slots=True)
class As:
    """The value that another argument has."""

    name: str


@dataclass(frozen=True, slots=True)
class Argument:
    """taken: values that ask for what is done anyway, or a type all of whose values change nothing. note: why, and the
    way out. told: all of a flag's values are taken, and who asks for one that isn't in `taken` is told the note."""

    taken: tuple[Any, ...] | type
    note: str
    told: bool = False

    @property
    def is_flag(self) -> bool:
        return self.taken is bool or (isinstance(self.taken, tuple) and any(isinstance(v, bool) for v in self.taken))

    def takes(self, value: Any, others: Mapping[str, Any]) -> bool:
        """Whether the value asks for what is done anyway. others: the arguments that came with it, by name."""
        if isinstance(self.taken, type):
            return isinstance(value, self.taken)
        known = [others.get(v.name) if isinstance(v, As) else v for v in self.taken]
        return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in known)


def _all(names: str, taken: tuple[Any, ...] | type, note: str, *, told: bool = False) -> dict[str, Argument]:
    return dict.fromkeys(names.split(), Argument(taken, note, told))


# Names that are ours too: the same in both. Of serve's, those that only a server has.
SHARED = (
    "model", "revision", "dtype", "load_format", "skip_tokenizer_init", "seed", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "gpu_memory_utilization", "enable_prefix_caching",
)  # fmt: skip
SHARED_SERVE = (
    "host", "port", "served_model_name", "api_key", "api_server_count", "shutdown_timeout", "max_num_queued_reqs",
)  # fmt: skip
SPELLINGS = {  # vLLM's values of these -> ours
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
}

SHORT = {  # vLLM's short options
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size", "-pcp": "prefill_context_parallel_size",
    "-dpn": "data_parallel_rank", "-dpr": "data_parallel_start_rank", "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address", "-dpp": "data_parallel_rpc_port", "-dpb": "data_parallel_backend",
    "-ep": "enable_expert_parallel", "-q": "quantization", "-O": "optimization_level", "-cc": "compilation_config",
    "-ac": "attention_config", "-sc": "speculative_config", "-asc": "api_server_count",
}  # fmt: skip

_ONE_GPU = "a process drives one GPU so far: start a server for each, and share requests out in front of them"
_ALONE = "belongs to several GPUs; with one it changes nothing"
_EXPERTS = "mixtures of experts are not served; with other models it changes nothing"
_ADAPTERS = "merge an adapter into its model (peft's merge_and_unload, save_pretrained), and give that folder"
_NO_ADAPTERS = "belongs to adapters; without them it changes nothing"
_TEXT = "only text is served, and with text it changes nothing"
_CODE = "code from outside is not run in the engine"
_GUIDED = "guided decoding is not served: a request that asks for it is refused"
_FORM = "ask for the form in the prompt, or sample several and keep those that parse"
_TOOLS = "put the tools' description in a message, and read the answer's text"
_TEMPLATE = "templates come from the model alone: put a chat_template.jinja into its folder"
_OVERRIDE = "config.json is read as it stands: change it in a copy of the folder"
_FILES = "how files are read changes no weight"
_GENERATES = "models generate text here; they don't embed, classify or score"
_KERNELS = "the machine decides on kernels: `penstock doctor` says which and why"
_GRAPHS = "steps are captured and compiled ahead as they are"
_SCHEDULER = "the scheduler has no such thing: max_num_seqs and max_num_batched_tokens say how much runs at once"
_OWN_SCHEDULER = "belongs to vLLM's scheduler; no answer depends on it"
_OFFLOAD = "weights and KV stay on the device: max_model_len and max_num_seqs make them smaller"
_BETWEEN = "neither KV nor weights travel between engines"
_MAMBA = "belongs to Mamba models, which are not served"
_REASONING = "reasoning is not parsed apart: it is in the answer's text"
_LOGS = "requests are logged by `--access-log` alone, without prompts"
_TRACES = "no traces are sent: /metrics and `--access-log` tell of requests"
_METRICS = "/metrics has what it has, without a switch"
_DRAFTS = "no tokens are drafted ahead so far: leave it out, answers are the same"

ENGINE: dict[str, Argument] = {
    **_all(
        "tensor_parallel_size pipeline_parallel_size data_parallel_size data_parallel_size_local nnodes "
        "prefill_context_parallel_size decode_context_parallel_size", (1,), _ONE_GPU),
    **_all("node_rank data_parallel_rank data_parallel_start_rank", (0,), _ONE_GPU),
    **_all("distributed_executor_backend", ("mp", "uni"), _ONE_GPU),
    **_all("data_parallel_backend", ("mp",), _ONE_GPU),
    **_all(
        "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb enable_elastic_ep "
        "ray_workers_use_nsight", (False,), _ONE_GPU),
    **_all(
        "master_addr master_port distributed_timeout_seconds data_parallel_address data_parallel_rpc_port "
        "dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size max_parallel_loading_workers",
        object, _ALONE),
    **_all("disable_custom_all_reduce disable_nccl_for_dp_synchronization", bool, _ALONE),
    **_all("numa_bind", (False,), "start it under numactl"),
    **_all("numa_bind_nodes numa_bind_cpus", (), "start it under numactl"),
    **_all("enable_expert_parallel enable_eplb enable_ep_weight_filter enable_dbo", bool, _EXPERTS),
    **_all(
        "moe_backend all2all_backend expert_placement_strategy eplb_config ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold", object, _EXPERTS),
    **_all("enable_return_routed_experts", (False,), "no model that is served has experts: leave it out"),
    # what the model is
    **_all("trust_remote_code", (False,), "no code of a model ever runs here", told=True),
    **_all("code_revision", str, "no code of a model ever runs here"),
    **_all("tokenizer hf_config_path", (As("model"),), "it is the model folder's own: put the files there"),
    **_all("tokenizer_revision", (As("revision"),), "the tokenizer is of the model's revision"),
    **_all("tokenizer_mode", ("auto", "hf"), "tokenizers are read from tokenizer.json"),
    **_all("tokenizer_pool_size", (0,), "one thread tokenises"),
    **_all("tokenizer_pool_type tokenizer_pool_extra_config", object, "without a pool it changes nothing"),
    **_all("task runner", ("auto", "generate"), _GENERATES),
    **_all("convert", ("auto", "none"), _GENERATES),
    **_all("pooler_config override_pooler_config", (), _GENERATES),
    **_all("model_impl", ("auto", "vllm"), "models are run by our own code, not by transformers'"),
    **_all("config_format", ("auto", "hf"), "config.json is in Hugging Face's form"),
    **_all("hf_overrides rope_scaling", ({},), _OVERRIDE),
    **_all("rope_theta override_attention_dtype", (), _OVERRIDE),
    **_all("model_weights", ("",), "weights are in the model's folder"),
    **_all("hf_token", (), "the hub's client reads HF_TOKEN, or what `hf auth login` stored: leave it out"),
    **_all("download_dir", (), "the hub's cache lies where HF_HOME or HF_HUB_CACHE says"),
    **_all("ignore_patterns", (["original/**/*"],), "safetensors, JSON and templates alone are fetched"),
    **_all("model_loader_extra_config", ({},), "safetensors are read without further settings"),
    **_all("safetensors_load_strategy pt_load_map_location", object, _FILES),
    **_all("use_tqdm_on_load", bool, _FILES),
    **_all("quantization quantization_config", (), "give the model in bfloat16, float16 or float32"),
    **_all("allow_deprecated_quantization calculate_kv_scales", (False,), "nothing is quantized"),
    **_all("kv_cache_dtype", ("auto", As("dtype")), "KV is held in the numbers of dtype"),
    **_all("kv_cache_dtype_skip_layers", ([],), "KV is held in the numbers of dtype"),
    **_all("generation_config", ("auto",), "over HTTP the model's generation_config.json gives defaults"),
    **_all("override_generation_config", ({},), "say it in requests, or in SamplingParams"),
    **_all("chat_template", (), _TEMPLATE),
    **_all("enable_lora enable_lora_bias enable_prompt_adapter enable_tower_connector_lora", (False,), _ADAPTERS),
    **_all("default_mm_loras", (), _ADAPTERS),
    **_all("fully_sharded_loras specialize_active_lora", bool, _NO_ADAPTERS),
    **_all(
        "max_loras max_lora_rank max_cpu_loras lora_dtype lora_target_modules lora_extra_vocab_size "
        "long_lora_scaling_factors max_prompt_adapters max_prompt_adapter_token", object, _NO_ADAPTERS),
    **_all(
        "limit_mm_per_prompt mm_processor_kwargs media_io_kwargs mm_processor_cache_gb mm_processor_cache_type "
        "mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin mm_tensor_ipc "
        "video_pruning_rate allowed_local_media_path allowed_media_domains", object, _TEXT),
    **_all(
        "language_model_only disable_mm_preprocessor_cache interleave_mm_strings skip_mm_profiling "
        "disable_chunked_mm_input enable_mm_processor_stats enable_multimodal_encoder_data_parallel", bool, _TEXT),
    **_all("enable_mm_embeds mm_encoder_only enable_prompt_embeds", (False,), "prompts are text or token ids"),
    **_all("io_processor_plugin logits_processor_pattern scheduler_cls", (), _CODE),
    **_all("worker_cls worker_extension_cls", ("auto", ""), _CODE),
    **_all("logits_processors", ([],), f"{_CODE}: use a request's logit_bias"),
    # how it runs
    **_all("enforce_eager", (False,), "CUDA graphs run where they save time; no answer depends on it", told=True),
    **_all("max_seq_len_to_capture max_cudagraph_capture_size optimization_level performance_mode", object, _GRAPHS),
    **_all("cudagraph_capture_sizes cuda_graph_sizes", (), f"{_GRAPHS}: leave it out"),
    **_all("compilation_config additional_config", ({},), f"{_GRAPHS}: leave it out"),
    **_all("attention_backend attention_config kernel_config ir_op_priority gdn_prefill_backend", (), _KERNELS),
    **_all("enable_flashinfer_autotune", bool, "nothing is tuned behind the start"),
    **_all("block_size", (16,), "a block has 16 tokens"),
    **_all("num_gpu_blocks_override kv_cache_memory_bytes", (), "kv_cache_tokens says it in tokens"),
    **_all("prefix_caching_hash_algo", str, "what the cache finds is compared token for token, whatever the hash"),
    **_all("swap_space", Real, "what is preempted is computed again; nothing is swapped"),
    **_all("cpu_offload_gb offload_group_size kv_offloading_size", (0,), _OFFLOAD),
    **_all("cpu_offload_params offload_params", (), _OFFLOAD),
    **_all("offload_backend offload_num_in_group offload_prefetch_step kv_offloading_backend", object,
           "belongs to offloading; without it nothing changes"),
    **_all("enable_chunked_prefill", (True,), "prompts are read in chunks; no answer depends on it", told=True),
    **_all("async_scheduling", (True,), "a step starts before the last is read; steps_ahead=0 reads each", told=True),
    **_all("disable_cascade_attn", (False,), "prefix_groups='off' attends each row by itself", told=True),
    **_all("disable_sliding_window", (False,), "lower max_model_len to stay within the window"),
    **_all("max_num_partial_prefills max_long_partial_prefills num_scheduler_steps stream_interval", (1,), _SCHEDULER),
    **_all("long_prefill_token_threshold scheduler_delay_factor num_lookahead_slots", (0,), _SCHEDULER),
    **_all("kv_sharing_fast_prefill", (False,), _SCHEDULER),
    **_all("scheduling_policy", ("fcfs",), "requests have one priority; between API keys the line is fair"),
    **_all(
        "multi_step_stream_outputs disable_async_output_proc use_v2_block_manager scheduler_reserve_full_isl "
        "disable_hybrid_kv_cache_manager", bool, _OWN_SCHEDULER),
    **_all("preemption_mode", str, _OWN_SCHEDULER),
    **_all("speculative_config speculative_model num_speculative_tokens ngram_prompt_lookup_max", (), _DRAFTS),
    **_all("kv_transfer_config kv_events_config ec_transfer_config weight_transfer_config", (), _BETWEEN),
    **_all("enable_sleep_mode", (False,), "close() gives the memory back, and a new LLM takes it"),
    **_all(
        "mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend "
        "mamba_cache_philox_rounds", object, _MAMBA),
    **_all("enable_mamba_cache_stochastic_rounding", bool, _MAMBA),
    # what it says
    **_all("max_logprobs", (20,), "a request may ask for up to 20"),
    **_all("logprobs_mode", ("raw_logprobs",), "logprobs are of the raw logits"),
    **_all("structured_outputs_config guided_decoding_backend", object, _GUIDED),
    **_all(
        "guided_decoding_disable_fallback guided_decoding_disable_any_whitespace "
        "guided_decoding_disable_additional_properties", bool, _GUIDED),
    **_all("reasoning_parser reasoning_config", (), _REASONING),
    **_all("reasoning_parser_plugin", ("",), _REASONING),
    **_all("enable_reasoning", (False,), _REASONING),
    **_all("disable_log_stats", bool, "no lines of statistics are written: stats() and /metrics have them"),
    **_all("disable_log_requests", bool, _LOGS),
    **_all("enable_log_requests aggregate_engine_logging enable_logging_iteration_details", (False,), _LOGS),
    **_all("otlp_traces_endpoint collect_detailed_traces", (), _TRACES),
    **_all("enable_layerwise_nvtx_tracing", (False,), _TRACES),
    **_all("kv_cache_metrics cudagraph_metrics", (False,), _METRICS),
    **_all("enable_mfu_metrics", bool, "/metrics says how near to the hardware's limit steps come, where it is known"),
    **_all("kv_cache_metrics_sample show_hidden_metrics_for_version", object, _METRICS),
    **_all("profiler_config", ({},), "benchmarks/shapes.py says what the parts of a step take"),
    **_all("fail_on_environ_validation", bool, "no variables of vLLM's are read"),
    **_all("renderer_num_workers", (1,), "long texts are tokenised beside the server's loop as it is"),
    **_all("served_model_name shutdown_timeout", object, "belongs to a server"),
    **_all("tokens_only", (False,), "skip_tokenizer_init serves token ids alone"),
}  # fmt: skip

SERVE: dict[str, Argument] = {
    **_all("lora_modules prompt_adapters", (), _ADAPTERS),
    **_all("chat_template_content_format", ("auto", "string"), "text parts are joined by line ends"),
    **_all("trust_request_chat_template", (False,), _TEMPLATE),
    **_all("default_chat_template_kwargs", ({},), "say chat_template_kwargs in each request"),
    **_all("response_role", ("assistant",), "answers are the assistant's"),
    **_all("return_tokens_as_token_ids", (False,), "say return_tokens_as_token_ids in a request"),
    **_all("enable_auto_tool_choice", (False,), _TOOLS),
    **_all("tool_call_parser tool_server", (), _TOOLS),
    **_all("tool_parser_plugin", ("",), _TOOLS),
    **_all("exclude_tools_when_tool_choice_none", bool, "tools are not served; without them it changes nothing"),
    **_all("log_config_file", (), _LOGS),
    **_all("enable_log_outputs log_error_stack", (False,), _LOGS),
    **_all("enable_log_deltas disable_uvicorn_access_log", bool, _LOGS),
    **_all("max_log_len uvicorn_log_level", object, _LOGS),
    **_all("disable_access_log_for_endpoints", (), f"{_LOGS}: filter its lines by path"),
    **_all("enable_prompt_tokens_details", bool, "usage always has prompt_tokens_details"),
    **_all("enable_request_id_headers", bool, "answers always have x-request-id"),
    **_all("enable_force_include_usage", (False,), "a stream's request asks for it: stream_options.include_usage"),
    **_all("enable_per_request_metrics enable_server_load_tracking", (False,), "/metrics tells of load and times"),
    **_all("enable_tokenizer_info_endpoint enable_offline_docs", (False,), "/openapi.json lists what there is"),
    **_all("disable_fastapi_docs", bool, "there are no such pages; /openapi.json lists what there is"),
    **_all("fingerprint_mode", ("none",), "answers have no system_fingerprint"),
    **_all("fingerprint_value", (), "answers have no system_fingerprint"),
    **_all("uds", (), "it listens on --host and --port"),
    **_all("allow_credentials", (False,), "no CORS headers are sent: serve the page behind the same host"),
    **_all("allowed_origins allowed_methods allowed_headers", (),
           "no CORS headers are sent: serve the page behind the same host, and name that by --allowed-host"),
    **_all("ssl_keyfile ssl_certfile ssl_ca_certs ssl_ciphers", (), "TLS is for a gateway in front"),
    **_all("enable_ssl_refresh", (False,), "TLS is for a gateway in front"),
    **_all("ssl_cert_reqs", (0,), "TLS is for a gateway in front"),
    **_all("root_path", ("",), "paths begin with /v1: let the gateway in front cut what stands before"),
    **_all("middleware", (), "code from outside is not run in the server: put a gateway in front"),
    **_all("h11_max_incomplete_event_size h11_max_header_count", Real, "heads and bodies have bounds of our own"),
    **_all("headless grpc enable_flash_late_interaction", (False,), "it serves OpenAI's HTTP API"),
    **_all("config", (), "options stand on the command line"),
    **_all("disable_frontend_multiprocessing", bool, "the engine is a process of its own"),
    **_all("cohere_is_reasoning_model", bool, "only OpenAI's API is served"),
    **_all("cohere_format", str, "only OpenAI's API is served"),
}  # fmt: skip

SAMPLING: dict[str, Argument] = {
    **_all("best_of", (As("n"),), "samples are not ranked: ask for n, and choose on your side"),
    **_all("use_beam_search early_stopping", (False,), "there is no beam search: ask for n samples"),
    **_all("length_penalty", (1,), "it belongs to beam search, which there is none of: leave it out"),
    **_all("guided_decoding structured_outputs", (), _FORM),
    **_all("bad_words", ([],), "forbid single tokens with logit_bias -100"),
    **_all("allowed_token_ids", (), "use logit_bias"),
    **_all("logits_processors", ([],), f"{_CODE}: use logit_bias"),
    **_all("extra_args", ({},), f"{_CODE}: nobody would read them"),
    **_all("truncate_prompt_tokens", (-1,), "cut the token ids yourself, and give them as the prompt"),
    **_all("spaces_between_special_tokens", (True,), "special tokens are always spelt apart"),
    **_all("flat_logprobs", (False,), "logprobs are columns until they are looked at, and read as a list of dicts"),
    **_all("skip_reading_prefix_cache", (False,), "enable_prefix_caching=False keeps nothing"),
    **_all("logprob_token_ids prompt_logprob_token_ids", (), "logprobs gives the 20 most likely"),
    **_all("prompt_logprob_start routed_experts_prompt_start", (0,), "prompts are told whole"),
    **_all("thinking_token_budget", (-1,), _REASONING),
    **_all("repetition_detection trace_decode_token_ids", (), "samples end at stop strings, stop ids and max_tokens"),
    **_all("output_kind", (), "outputs come whole, from stream() one by one: leave it out"),
    **_all("stream_interval", (1,), "outputs come whole, from stream() one by one: leave it out"),
    **_all("skip_clone", bool, "parameters are only read"),
}  # fmt: skip

CALL: dict[str, Argument] = {  # of LLM.generate and LLM.chat
    **_all("lora_request prompt_adapter_request", (), _ADAPTERS),
    **_all("priority", (0, []), "requests have one priority"),
    **_all("tokenization_kwargs", ({},), "encode the text yourself (get_tokenizer), and give token ids as the prompt"),
    **_all("guided_options_request", (), _FORM),
    **_all("chat_template", (), _TEMPLATE),
    **_all("chat_template_content_format", ("auto", "string"), "text parts are joined by line ends"),
    **_all("tools", ([],), _TOOLS),
    **_all("mm_processor_kwargs", object, _TEXT),
}


def check(name: str, argument: Argument, value: Any, others: Mapping[str, Any], shown: str) -> str | None:
    """What whoever asked for it has to be told, if anything. Raises UsageError for a value that isn't taken.

    shown: the argument and its value as they were typed.
    """
    if value is None or argument.takes(value, others):
        return None
    if len(shown) > LONGEST:
        shown = shown[: LONGEST - 3] + "..."
    if argument.told and isinstance(value, bool):
        return f"{shown} changes nothing: {argument.note}"
    which = "" if not argument.taken or (argument.is_flag and isinstance(value, bool)) else f" (only {spelt(argument)})"
    raise UsageError(f"{shown} is not served{which}: {argument.note}", param=name)


def spelt(argument: Argument) -> str:
    """The values that are taken, in words."""
    if isinstance(argument.taken, type):
        return _KINDS[argument.taken]
    return " or ".join(f"the same as {v.name}" if isinstance(v, As) else repr(v) for v in argument.taken)


def sift(
    given: Mapping[str, Any], table: Mapping[str, Argument], usual: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """What of `given` is not vLLM's alone, and what has to be told. Raises UsageError for what is refused.

    usual: values of what wasn't given.
    """
    others = {**(usual or {}), **given}
    left = {name: value for name, value in given.items() if name not in table}
    told = [check(n, table[n], v, others, f"{n}={v!r}") for n, v in given.items() if n in table]
    return left, [line for line in told if line is not None]


def engine_knobs(model: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The knobs of what LLM was given, spelt as we do, and what has to be told. None is left out, as vLLM's is."""
    left, told = sift({**given, "model": model}, ENGINE)
    return {name: ours(name, value) for name, value in left.items() if value is not None}, told


def ours(name: str, value: Any) -> Any:
    """The value of a knob as we spell it: `half` is `float16`; a dtype of torch's is its name."""
    plain = str(value).removeprefix("torch.") if name == "dtype" else value
    return SPELLINGS.get(name, {}).get(plain, plain) if isinstance(plain, str) else value


def takes_vllms(params: type[ModelT]) -> type[ModelT]:
    """Decorates SamplingParams: those arguments that only vLLM's has are checked, and go no further."""
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
        raise UsageError(f"{method} takes no argument {next(iter(left))!r}: docs/llm.md has those that it takes")
