"""Explanations shared by several vLLM arguments. Each says why an argument is refused, or why it
changes nothing."""

from __future__ import annotations

CONTEXT = "a context is not cut over GPUs: tensor_parallel_size gives it the memory of several"
ONE_HOST = (
    "replicas run on one machine: start a server on each, and share requests out in front of them"
)
PIPELINE = (
    "a model is not cut by layers: data_parallel_size runs whole ones, and quantization='fp8'"
    " halves it"
)
ADAPTERS = (
    "one adapter is merged into the weights, by lora=DIR (--lora DIR); several at once are not"
    " served"
)
NOTHING = "belongs to what is not served, or to how vLLM does it; here it changes nothing"
CODE = "code from outside is not run in the engine"
GUIDED = "llguidance makes all masks; a request says the rest in structured_outputs"
FORM = (
    "say SamplingParams(structured_outputs=StructuredOutputsParams(json=..., regex=...,"
    " choice=...))"
)
TEMPLATE = (
    "a template is the engine's: say chat_template=FILE (--chat-template FILE) when it starts"
)
OVERRIDE = "config.json is read as it stands: change it in a copy of the folder"
GENERATES = "models generate text here; they don't embed, classify or score"
KERNELS = "the machine decides on kernels: `penstock doctor` says which and why"
GRAPHS = "steps are captured and compiled ahead as they are"
SCHEDULER = (
    "the scheduler has no such thing: max_num_seqs and max_num_batched_tokens say how much runs at"
    " once"
)
OWN_SCHEDULER = "belongs to vLLM's scheduler; no answer depends on it"
OFFLOAD = "weights and KV stay on the device: max_model_len and max_num_seqs make them smaller"
BETWEEN = "neither KV nor weights travel between engines"
CONTENT = "whether a template takes text or parts is found by asking it: leave it out"
REASONING = "how long a model thinks is its template's: say chat_template_kwargs in a request"
LOGS = "requests are logged by `--access-log` alone, without prompts"
TRACES = "no traces are sent: /metrics and `--access-log` tell of requests"
METRICS = "/metrics has what it has, without a switch"
DRAFTS = "speculative_config says it, in JSON"
