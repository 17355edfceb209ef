"""Alternatives for paths that are not served. For paths of OpenAI's and other servers' APIs. Knows
only paths."""

from __future__ import annotations

_GENERATES = "this server generates text, and has no"
_CONTROLS = "pausing is a part of /update_weights and /sleep:"
# beginning of a path -> message with an alternative; the longest match counts
INSTEAD = {
    "/v1/embeddings": f"{_GENERATES} embeddings: ask a server of an embedding model",
    "/embeddings": f"{_GENERATES} embeddings: ask a server of an embedding model",
    "/pooling": f"{_GENERATES} pooled hidden states: ask a server of an embedding model",
    "/classify": f"{_GENERATES} classifiers: take /generative_scoring, with label_token_ids",
    "/score": f"{_GENERATES} cross-encoders: take /generative_scoring, with label_token_ids",
    "/v1/score": f"{_GENERATES} cross-encoders: take /generative_scoring, with label_token_ids",
    "/rerank": f"{_GENERATES} rerankers: ask a server of a reranking model",
    "/v1/rerank": f"{_GENERATES} rerankers: ask a server of a reranking model",
    "/v2/rerank": f"{_GENERATES} rerankers: ask a server of a reranking model",
    "/v1/audio": f"{_GENERATES} audio: ask a server of a speech model",
    "/v1/images": f"{_GENERATES} images: ask a server of an image model",
    "/v1/videos": f"{_GENERATES} videos: ask a server of a video model",
    "/v1/realtime": f"{_GENERATES} sessions of speech: take /v1/chat/completions with stream",
    "/v1/moderations": f"{_GENERATES} moderation: ask a server of a model that is made for it",
    "/v1/fine_tuning": (
        "this server trains nothing: train elsewhere, and serve the folder that comes of it"
    ),
    "/v1/assistants": (
        "this server keeps no assistants: take /v1/chat/completions, and keep the talk on your side"
    ),
    "/v1/threads": (
        "this server keeps no threads: take /v1/chat/completions, and keep the talk on your side"
    ),
    "/v1/messages": "Anthropic's messages are not served: take /v1/chat/completions",
    "/v1/load_lora_adapter": (
        "adapters are not loaded while serving: start it with --lora, which merges one"
    ),
    "/pause": (
        f"{_CONTROLS} it waits for what runs, ends it (mode abort) or keeps it, and holds what"
        " comes meanwhile"
    ),
    "/resume": f"{_CONTROLS} what was held goes on behind it",
    "/collective_rpc": (
        "no code from outside is run in the engine: take /update_weights for weights, /sleep for"
        " memory"
    ),
    **dict.fromkeys(
        ("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"),
        "weights come in one call: POST /update_weights, with model_path, or shared as"
        " penstock.weights.share tells it",
    ),
    "/custom/synchronous-batch-completions": (
        "Tokasaurus's batch route is /v1/bulk here: a completion's body a "
        "line, with a custom_id, and answers as lines of JSON"
    ),
    "/generate": "this path is of another server: take /inference/v1/generate, or /v1/completions",
    "/invocations": "this path is of another server: take /v1/completions or /v1/chat/completions",
}


def not_served(path: str) -> str | None:
    """Returns the message with an alternative for a path that other servers have; None for any
    other path."""
    fitting = [start for start in INSTEAD if path == start or path.startswith(f"{start}/")]
    return INSTEAD[max(fitting, key=len)] if fitting else None
