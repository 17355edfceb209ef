"""The house as data: the floors, and the laws that are lists of names. `laws.py` holds the sources
to it.

The picture is the one in docs/README.md. It knows no source file.
"""

from __future__ import annotations

# From the ground up. A room imports from floors below its own; rooms of one floor don't see each
# other.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "request",
            "row_table",
            "config",
            "errors",
            "disk",
            "journal_lines",
            "json_keys",
            "key_set",
            "mask_board",
            "shared_weights",
            "speculative",
            "status_line",
            "vllm_arguments",
            "request_checks",
        }
    ),
    frozenset({"children", "demo"}),
    frozenset({"artifact", "journal", "kernels", "parallel", "schedule", "text", "almanac"}),
    frozenset({"quant", "bench", "structured_output", "sandbox"}),
    frozenset({"layers"}),
    frozenset({"models"}),
    frozenset({"weights"}),
    frozenset({"execute"}),
    frozenset({"ranks"}),
    frozenset({"engine"}),
    frozenset({"replicas"}),
    frozenset({"llm", "server"}),
    frozenset({"build", "jobs", "deploy", "simulate"}),
    frozenset({"on_ray"}),
    frozenset({"cli", "__main__", "__init__"}),
)
# The same inside a room: its sub-rooms from the ground up.
INNER_FLOORS: dict[str, tuple[frozenset[str], ...]] = {
    "server": (
        frozenset({"openai"}),
        frozenset({"online"}),
        frozenset({"batch"}),
        frozenset({"api_server"}),
    ),
}
FLOOR_OF: dict[str, int] = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
WORDS = FLOORS[0]  # the words that all rooms share: they may use each other
ROOF = FLOORS[-1]  # the ways in: they may use each other
PUBLIC_WORDS = frozenset({"__version__"})  # what may be had from `penstock` itself on any floor

# What the words may use: stdlib and these.
GROUND_PACKAGES = frozenset({"numpy"})

# Room -> outside packages that it never imports, in no function either.
BARRED_PACKAGES: dict[str, frozenset[str]] = {
    "schedule": frozenset({"torch", "triton"}),
    "text": frozenset({"torch", "triton"}),
}

# Room -> rooms below it that it doesn't see all the same.
BARRED_ROOMS: dict[str, frozenset[str]] = {
    "kernels": frozenset({"text"}),
    "layers": frozenset({"text"}),
    "models": frozenset({"text"}),
    "execute": frozenset({"text"}),
}

# Room -> the only rooms that it sees.
ONLY_ROOMS: dict[str, frozenset[str]] = {"bench": WORDS | {"almanac", "children"}}

# Outside package -> the only places (folders or files under src/penstock) that import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "triton": ("kernels/triton/",),
    "zmq": ("engine/channel.py",),  # where processes meet
}

# Imported inside functions: by who needs them, when they need them.
LATE = frozenset({"ray", "modal", "matplotlib"})

# Modules that nobody imports: each can run what a file says.
BARRED_MODULES = frozenset(
    {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
)

# Calls that nobody makes: the same by another door. `owner.name` bars an attribute of that owner,
# `.name` of any owner.
BARRED_CALLS = frozenset(
    {
        "eval",
        "exec",
        "builtins.eval",
        "builtins.exec",
        "torch.load",
        "torch.save",
        ".send_pyobj",
        ".recv_pyobj",
    }
)
# As a keyword, a name or a text. The one file beside it may hold it as a text: it says what becomes
# of it.
BARRED_WORDS = {"trust_remote_code": "vllm_arguments/engine_table.py"}

LONGEST_FILE = 450  # lines

# Names of classes and files that stand twice all the same, and why.
NAMED_TWICE: dict[str, str] = {
    "BatchLimits": "of a step's batch and of batch files: each is the only one of its room",
    "Attention": "the operation, and the layer that calls it",
    "TokenLogprobs": "what the operation gives on the device, and the step's contract on the host",
}

# Import name -> its name in pyproject.toml, where the two differ.
DISTRIBUTIONS = {
    "zmq": "pyzmq",
    "yaml": "pyyaml",
    "prometheus_client": "prometheus-client",
    "python_multipart": "python-multipart",
}
# come with torch, or with who deploys there
NOT_OURS_TO_INSTALL = frozenset({"triton", "ray", "modal"})
