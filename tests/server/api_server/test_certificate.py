"""HTTPS: a certificate that is renewed while it serves, and files that are none."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from fake_runner import Orders
from service import COMPLETIONS, Serving, make_folder, until
from typer.testing import CliRunner

from penstock.cli import app

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
]


def make(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-days",
        "2",
    ]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        [*command, *names, *(options or ("-nodes",)), "-keyout", key, "-out", cert], check=True
    )
    return cert, key


def shown(url: str) -> str:
    """The certificate that a new connection is shown."""
    host, port = url.removeprefix("https://").split(":")
    return ssl.get_server_certificate((host, int(port)))


def test_it_serves_and_takes_a_renewed_one(tmp_path: Path) -> None:
    cert, key = make(tmp_path, "first")
    other, other_key = make(tmp_path, "second")
    first, second = cert.read_text(), other.read_text()
    make_folder(tmp_path, Orders(step_seconds=0.02), longest=256)
    with Serving(tmp_path, ssl_certfile=str(cert), ssl_keyfile=str(key)) as serving:
        assert serving.url.startswith("https://") and ssl.DER_cert_to_PEM_cert(
            ssl.PEM_cert_to_DER_cert(shown(serving.url))
        ) == ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(first))
        trusted = ssl.create_default_context(cadata=first + second)
        with httpx.Client(base_url=serving.url, verify=trusted) as http:
            body = {"prompt": [5, 6], "max_tokens": 4, "stream": True}
            with http.stream("POST", COMPLETIONS, json=body) as stream:
                assert stream.read().endswith(b"[DONE]\n\n")
            # ended by the connection, whose answer arrives
            large = http.post(COMPLETIONS, content=b"x" * 40_000_000)
            assert large.status_code == 413
            shutil.copy(other, cert)  # half of the pair: the one that serves stays
            until(lambda: "serves stays" in serving.stderr())
            assert "doesn't fit the key" in serving.stderr()
            assert shown(serving.url).split() == first.split()
            shutil.copy(other_key, key)
            until(lambda: shown(serving.url).split() == second.split())
            assert http.get("/health").status_code == 200


def test_files_that_are_none_are_one_line(tmp_path: Path) -> None:
    cert, key = make(tmp_path, "one")
    _, other = make(tmp_path, "two")
    locked = make(tmp_path, "locked", "-passout", "pass:secret")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for words, said in [
        (["--ssl-certfile", cert, "--ssl-keyfile", other], "doesn't fit the key in"),
        (["--ssl-certfile", locked[0], "--ssl-keyfile", locked[1]], "is encrypted"),
        (["--ssl-certfile", text, "--ssl-keyfile", key], "no certificate with its key in PEM"),
        (["--ssl-certfile", cert], "no certificate with its key in PEM"),
        (["--ssl-certfile", tmp_path / "none.pem", "--ssl-keyfile", key], "--ssl-certfile"),
        (["--ssl-certfile", cert, "--ssl-keyfile", tmp_path / "none.key"], "--ssl-keyfile"),
        (["--ssl-keyfile", key], "give --ssl-certfile too"),
    ]:
        ended = CliRunner().invoke(app, ["serve", "no-such-model", *map(str, words)])
        assert ended.exit_code == 2 and said in ended.output and ended.output.count("\n") == 1, (
            ended.output
        )
