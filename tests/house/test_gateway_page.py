"""The numbers of docs/open_server.md are the server's own."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from penstock.server.openai.http_limits import USUAL

PAGE = (Path(__file__).parents[2] / "docs" / "open_server.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return str(found)


def test_gateways_take_what_the_server_takes() -> None:
    nginx, caddy = block("nginx"), block("caddy")
    bound = USUAL.max_body_bytes >> 20
    assert f"client_max_body_size {bound}m;" in nginx and f"max_size {bound}MiB" in caddy
    assert "proxy_buffering off;" in nginx and "flush_interval -1" in caddy
    assert nginx.count("{") == nginx.count("}") and caddy.count("{") == caddy.count("}")


def test_prometheus_sends_a_key() -> None:
    (job,) = yaml.safe_load(block("yaml"))["scrape_configs"]
    # /metrics is its default
    assert job["authorization"]["type"] == "Bearer" and "metrics_path" not in job
