"""Table of vLLM's engine arguments. It has Penstock's treatment of each argument of vLLM's engine
and commands."""

from __future__ import annotations

from numbers import Real

from penstock.vllm_arguments.argument import Argument, As, named
from penstock.vllm_arguments.reasons import (
    ADAPTERS,
    BETWEEN,
    CODE,
    CONTEXT,
    DRAFTS,
    GENERATES,
    GRAPHS,
    GUIDED,
    KERNELS,
    LOGS,
    METRICS,
    NOTHING,
    OFFLOAD,
    ONE_HOST,
    OVERRIDE,
    OWN_SCHEDULER,
    PIPELINE,
    REASONING,
    SCHEDULER,
    TRACES,
)

# Arguments that vLLM and Penstock have under the same name. Arguments of `serve` are in
# server_table.py.
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
    "speculative_config",
)
SPELLINGS = {  # argument -> vLLM's spelling of a value -> Penstock's
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
SHORT = {  # vLLM's short command line options -> argument
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
ENGINE: dict[str, Argument] = {
    **named("pipeline_parallel_size", (1,), PIPELINE),
    **named("prefill_context_parallel_size decode_context_parallel_size", (1,), CONTEXT),
    **named("nnodes", (1,), ONE_HOST),
    **named("data_parallel_size_local", (As("data_parallel_size"),), ONE_HOST),
    **named("node_rank data_parallel_rank data_parallel_start_rank", (0,), ONE_HOST),
    **named("distributed_executor_backend", ("mp", "uni"), ONE_HOST),
    **named("data_parallel_backend", ("mp",), ONE_HOST),
    **named(
        "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb"
        " enable_elastic_ep ray_workers_use_nsight",
        (False,),
        ONE_HOST,
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
    # arguments about the model
    **named("trust_remote_code", (False,), "no code of a model ever runs here", told=True),
    **named("code_revision", str, "no code of a model ever runs here"),
    **named("hf_config_path", (As("model"),), "it is the model folder's own: put the files there"),
    **named("tokenizer_revision", (As("revision"),), "the tokenizer is of the model's revision"),
    **named("tokenizer_mode", ("auto", "hf"), "tokenizers are read from tokenizer.json"),
    **named("tokenizer_pool_size", (0,), "one thread tokenises"),
    **named("task runner", ("auto", "generate"), GENERATES),
    **named("convert", ("auto", "none"), GENERATES),
    **named("pooler_config override_pooler_config", (), GENERATES),
    **named("model_impl", ("auto", "vllm"), "models are run by our own code, not by transformers'"),
    **named("config_format", ("auto", "hf"), "config.json is in Hugging Face's form"),
    **named("hf_overrides rope_scaling", ({},), OVERRIDE),
    **named("rope_theta override_attention_dtype", (), OVERRIDE),
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
        ADAPTERS,
    ),
    **named("default_mm_loras", (), ADAPTERS),
    **named(
        "enable_mm_embeds mm_encoder_only enable_prompt_embeds",
        (False,),
        "prompts are text or token ids",
    ),
    **named("io_processor_plugin logits_processor_pattern scheduler_cls", (), CODE),
    **named("worker_cls worker_extension_cls", ("auto", ""), CODE),
    **named("logits_processors", ([],), f"{CODE}: use a request's logit_bias"),
    # arguments about execution
    **named(
        "enforce_eager",
        (False,),
        "CUDA graphs run where they save time; no answer depends on it",
        told=True,
    ),
    **named("cudagraph_capture_sizes cuda_graph_sizes", (), f"{GRAPHS}: leave it out"),
    **named("compilation_config additional_config", ({},), f"{GRAPHS}: leave it out"),
    **named(
        "attention_backend attention_config kernel_config ir_op_priority gdn_prefill_backend",
        (),
        KERNELS,
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
    **named("cpu_offload_gb offload_group_size kv_offloading_size", (0,), OFFLOAD),
    **named("cpu_offload_params offload_params", (), OFFLOAD),
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
        SCHEDULER,
    ),
    **named(
        "long_prefill_token_threshold scheduler_delay_factor num_lookahead_slots", (0,), SCHEDULER
    ),
    **named("kv_sharing_fast_prefill", (False,), SCHEDULER),
    **named(
        "scheduling_policy",
        ("fcfs",),
        "requests have one priority; between API keys the line is fair",
    ),
    **named("preemption_mode", str, OWN_SCHEDULER),
    **named(
        "speculative_model num_speculative_tokens ngram_prompt_lookup_max",
        (),
        DRAFTS,
    ),
    **named(
        "kv_transfer_config kv_events_config ec_transfer_config weight_transfer_config",
        (),
        BETWEEN,
    ),
    **named("enable_sleep_mode", bool, "every engine can sleep"),
    # arguments about output
    **named("max_logprobs", (20,), "a request may ask for up to 20"),
    **named("logprobs_mode", ("raw_logprobs",), "logprobs are of the raw logits"),
    **named("structured_outputs_config", dict, f"its disable_any_whitespace is read; {GUIDED}"),
    **named("guided_decoding_backend", str, GUIDED),
    **named("guided_decoding_disable_fallback", bool, GUIDED),
    **named("guided_decoding_disable_any_whitespace", bool, "it is our disable_any_whitespace"),
    **named(
        "guided_decoding_disable_additional_properties",
        (False,),
        "say additionalProperties: false in the schema",
    ),
    **named(
        "reasoning_parser", (), "`penstock serve` has it; here reasoning is in the answer's text"
    ),
    **named("reasoning_config", (), REASONING),
    **named("reasoning_parser_plugin", ("",), CODE),
    **named("enable_reasoning", bool, "an older switch: `serve --reasoning-parser` alone says it"),
    **named(
        "disable_log_stats",
        bool,
        "no lines of statistics are written: stats() and /metrics have them",
    ),
    **named("disable_log_requests", bool, LOGS),
    **named(
        "enable_log_requests aggregate_engine_logging enable_logging_iteration_details",
        (False,),
        LOGS,
    ),
    **named("otlp_traces_endpoint collect_detailed_traces", (), TRACES),
    **named("enable_layerwise_nvtx_tracing", (False,), TRACES),
    **named("kv_cache_metrics cudagraph_metrics", (False,), METRICS),
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
    # arguments of features that Penstock lacks, or of vLLM's implementation
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
        NOTHING,
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
        NOTHING,
    ),
}
STRUCTURED: dict[str, Argument] = {  # keys of structured_outputs_config
    **named("backend", str, GUIDED),
    **named("disable_fallback disable_any_whitespace", bool, GUIDED),
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
