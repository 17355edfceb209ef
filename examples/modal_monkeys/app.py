"""meta-llama/Llama-3.2-1B-Instruct on Modal, served by Penstock over OpenAI's HTTP API.

    modal run app.py::build      # fits the model to the GPU, into the volume; the server opens that from then on
    modal deploy app.py          # the server: no container while nobody asks
    modal run app.py::monkeys    # repeated sampling over GSM8K: coverage, majority vote, tokens a second

`penstock deploy modal` wrote this file, once. It is yours to change.
"""

import socket
import subprocess
import time
from pathlib import Path

import modal

MINUTES = 60  # seconds

MODEL = ["meta-llama/Llama-3.2-1B-Instruct", "--revision", "4e20de362430cd3b72f300e6b0f18e50e7166e08"]
ARTIFACT = "/penstock/built/penstock-monkeys"  # what `build` makes
GPU = "H100!"
PORT = 8000

SERVE = [
    "--host", "0.0.0.0",
    "--port", "8000",
    "--served-model-name", "meta-llama/Llama-3.2-1B-Instruct",
    "--shutdown-timeout", "60",
    "--allow-no-key",
    "--allowed-host", "*",
]  # fmt: skip
BUILD = [
    "penstock", "build", "meta-llama/Llama-3.2-1B-Instruct",
    "--revision", "4e20de362430cd3b72f300e6b0f18e50e7166e08",
    "--out", "/penstock/built/penstock-monkeys",
    "--shape", "256x256:128",
]  # fmt: skip
MONKEYS = ["--few-shot", "4", "--temperature", "0.6", "--max-tokens", "1024"]

app = modal.App("penstock-monkeys")
image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("build-essential")  # Triton makes its launchers with a C compiler
    .add_local_dir(
        Path(__file__).parent / "../..",  # a checkout of Penstock
        "/opt/penstock",
        copy=True,
        ignore=~modal.FilePatternMatcher("pyproject.toml", "README.md", "LICENSE", "src/**"),
    )
    .uv_pip_install("/opt/penstock[parquet,plot]")
    .env({"HF_XET_HIGH_PERFORMANCE": "1"})
)
volume = modal.Volume.from_name("penstock", create_if_missing=True)
hub_cache = modal.Volume.from_name("huggingface-cache", create_if_missing=True)
resources = {
    "image": image,
    "gpu": GPU,
    "cpu": 8.0,
    "volumes": {"/penstock": volume, "/root/.cache/huggingface": hub_cache},
    "secrets": [modal.Secret.from_name("huggingface-secret")],
}


def opened() -> list[str]:
    """What is run: the artifact once it is built, else the model as it is."""
    return [ARTIFACT] if Path(ARTIFACT, "penstock.json").is_file() else MODEL


def listens() -> bool:
    """Whether the server takes connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", PORT)) == 0


@app.server(
    **resources,
    port=PORT,
    target_concurrency=16,  # HTTP requests, each of any number of samples
    max_containers=1,
    scaledown_window=3600,
    startup_timeout=900,
    exit_grace_period=90,  # longer than the server's --shutdown-timeout
    routing_region="us-east",
    unauthenticated=False,  # Modal-Key and Modal-Secret in each request's head
)
class Server:
    @modal.enter()
    def start(self):
        self.process = subprocess.Popen(["penstock", "serve", *opened(), *SERVE])
        while not listens():  # from then on it is ready
            if self.process.poll() is not None:
                raise RuntimeError("the server ended before it was ready: its last line says why")
            time.sleep(0.2)

    @modal.exit()
    def stop(self):
        self.process.terminate()  # running requests end first
        self.process.wait()


@app.function(**resources, timeout=120 * MINUTES, max_containers=1)
def build():
    """Quantizes, times choices, compiles, checks. Killed, the same command goes on."""
    subprocess.run(BUILD, check=True)
    volume.commit()


@app.function(**resources, timeout=240 * MINUTES, max_containers=1)
def monkeys(problems: str = "openai/gsm8k", shots: str = "openai/gsm8k", n: int = 1024, limit: int = 16):
    """Samples each problem n times. The report is in the volume: modal volume get penstock monkeys"""
    out = f"/penstock/monkeys/{app.name}-{limit}x{n}"
    asked = ["--problems", problems, "--shots", shots, "--n", str(n), "--limit", str(limit), "--out", out]
    subprocess.run(["penstock", "monkeys", *opened(), *asked, *MONKEYS], check=True)
    volume.commit()
