"""The same service on Modal: the model built into a volume once, a method that answers a batch, the
endpoint over it.

    modal run modal_service.py::build     # minutes, once
    modal run modal_service.py            # the 128 prompts through the method, and how fast they
    came
    modal deploy modal_service.py         # POST /generate and /docs, at the address that it prints

It knows Modal and the files beside it, which know nothing of Modal.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import modal

MINUTES = 60  # seconds

GPU = "H100!"  # exactly that: what the build timed holds for it
ARTIFACT = "/penstock/built/llama-8b"
BUILD = [
    "penstock",
    "build",
    "NousResearch/Meta-Llama-3-8B-Instruct",
    "--revision",
    "b1532e4dee724d9ba63fe17496f298254d87ca64",
    "--out",
    ARTIFACT,
    "--shape",
    "256x256:128",
]

app = modal.App("penstock-fitted-service")
image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("build-essential")  # Triton makes its launchers with a C compiler
    .add_local_dir(
        Path(__file__).parent / "../..",  # a checkout of Penstock
        "/opt/penstock",
        copy=True,
        ignore=~modal.FilePatternMatcher("pyproject.toml", "README.md", "LICENSE", "src/**"),
    )
    .uv_pip_install("/opt/penstock")
    .add_local_python_source("fitted_service", "service_app", "service_prompts")
)
volume = modal.Volume.from_name("penstock", create_if_missing=True)
hub_cache = modal.Volume.from_name("huggingface-cache", create_if_missing=True)
resources = {
    "image": image,
    "gpu": GPU,
    "cpu": 8.0,
    "volumes": {"/penstock": volume, "/root/.cache/huggingface": hub_cache},
}


@app.function(**resources, timeout=120 * MINUTES, max_containers=1)
def build() -> None:
    """Fits the model to the GPU and to 128 prompts at once. Killed, the same command goes on."""
    subprocess.run(BUILD, check=True)
    volume.commit()


@app.cls(
    **resources, startup_timeout=15 * MINUTES, timeout=20 * MINUTES, scaledown_window=10 * MINUTES
)
@modal.concurrent(
    max_inputs=8
)  # the next batch waits in the container: they run one after the other
class Service:
    """One model a container."""

    @modal.enter()
    def open(self) -> None:
        from fitted_service import FittedService

        self.service = FittedService(ARTIFACT)

    @modal.method()
    def answer(self, prompts: list[str], settings: dict | None = None) -> dict:
        """Runs a batch; `settings` are those of the endpoint. Returns answers, seconds and
        tokens_per_second."""
        from fitted_service import Settings

        return self.service.answer(prompts, Settings(**(settings or {}))).model_dump()

    @modal.asgi_app(requires_proxy_auth=True)
    def web(self):  # Starlette's, which need not be installed here
        from service_app import make_app

        return make_app(self.service)

    @modal.exit()
    def close(self) -> None:
        self.service.close()


@app.local_entrypoint()
def main() -> None:
    """Answers all prompts of this example on Modal."""
    from service_prompts import all_prompts

    prompts = all_prompts()
    batch = Service().answer.remote(prompts)
    print(f"{prompts[0]}\n    {batch['answers'][0]['text'].strip()[:200]}\n")
    tokens = sum(answer["tokens"] for answer in batch["answers"])
    speed = f"{batch['tokens_per_second']:,.0f} output tok/s"
    print(f"{len(prompts)} prompts, {tokens:,} tokens in {batch['seconds']:.2f} s: {speed}")
