"""Who gets in: keys, where they come from and what they are called, hosts and pages, and a public
address without a key."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from pathlib import Path

import httpx
import pytest
from bare_http import connect, read_all
from server_fake import make_tokenizer, running_server
from typer.testing import CliRunner

from penstock.config import Config
from penstock.errors import UsageError
from penstock.server.online.api_keys import ENVIRONMENT, Key, find_key, gather_keys
from penstock.server.online.auth import (
    AccessPolicy,
    AuthMiddleware,
    check_hosts,
    check_public,
    is_loopback,
)
from penstock.server.openai.http_errors import HttpError

pytestmark = pytest.mark.torch

MODELS = "/v1/models"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def nothing(*_: object) -> None:
    """What stands behind a gate whose requests nobody serves."""


def gate(access: AccessPolicy) -> AuthMiddleware:
    return AuthMiddleware(nothing, access)


def test_replicas_are_restarted_by_an_operators_key_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        '[[key]]\nname = "a"\nkey = "plain"\n[[key]]\nname = "b"\nkey = "operator"\nadmin = true\n'
    )
    access = AccessPolicy(keys=gather_keys(["on the line"], file, {}))
    with (
        running_server(make_tokenizer(tmp_path), access=access) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        for key, status in (
            ("plain", 403),
            ("nobody's", 401),
            ("operator", 200),
            ("on the line", 200),
        ):
            assert http.post("/admin/restart", headers=bearer(key)).status_code == status, key
        assert server.engine.restarts == 2
        for path in ("/update_weights", "/reset_prefix_cache", "/sleep", "/wake_up"):
            answer = http.post(path, json={"model_path": "/w"}, headers=bearer("plain"))
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "not_an_admin"
        assert server.engine.controls == []


def test_without_keys_an_admins_routes_are_anybodys_only_where_the_start_said_so(
    tmp_path: Path,
) -> None:
    for allowed in (False, True):
        access = AccessPolicy(admin_without_key=allowed)
        with (
            running_server(make_tokenizer(tmp_path), access=access) as server,
            httpx.Client(base_url=server.url) as http,
        ):
            for path in (
                "/update_weights",
                "/reset_prefix_cache",
                "/sleep",
                "/wake_up",
                "/admin/restart",
            ):
                answer = http.post(
                    path, json={"model_path": "/w"} if path == "/update_weights" else None
                )
                assert answer.status_code == (200 if allowed else 403), path
                if not allowed:
                    assert answer.json()["error"]["code"] == "not_an_admin"
                    assert "--allow-admin-without-key" in answer.json()["error"]["message"]
            assert bool(server.engine.controls) == allowed
            assert (
                http.get("/weights_version").status_code
                == http.get("/is_sleeping").status_code
                == 200
            )


def test_a_key_file_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[key]]\nname = "a"\nkey = "plain"\n')
    file.chmod(0o662)
    with pytest.raises(UsageError, match="chmod o-w"):
        gather_keys([], file, {})
    file.chmod(0o664)
    assert [key.name for key in gather_keys([], file, {})] == ["a"]


def test_several_keys_each_open_and_nothing_near_them_does(tmp_path: Path) -> None:
    access = AccessPolicy(keys=gather_keys(["one-key", "other-key"], None, {}))
    with (
        running_server(make_tokenizer(tmp_path), access=access) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        for header in (bearer("one-key"), bearer("other-key"), {"authorization": "bearer one-key"}):
            assert http.get(MODELS, headers=header).status_code == 200
        for shown in ("one-ke", "one-keyy", "One-Key", "Bearer one-key", digest("one-key")):
            answer = http.get(MODELS, headers=bearer(shown))
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), (
                shown
            )
            assert shown not in answer.text
        twice = [("authorization", "Bearer one-key"), ("authorization", "Bearer one-key")]
        assert http.get(MODELS, headers=twice).status_code == 401
        for path in (MODELS, "/metrics", "/openapi.json", "/version", "/no/such/path", "/health/"):
            assert http.get(path).status_code == 401
        for path in ("/health", "/health/live"):
            assert http.get(path).status_code == 200
        # With keys no page is a danger, and a gateway may bring any name.
        for header in ({"host": "api.example.com"}, {"origin": "https://page.example"}):
            assert http.get(MODELS, headers={**bearer("one-key"), **header}).status_code == 200


def test_hosts_that_are_answered(tmp_path: Path) -> None:
    """To the letter: test_hosts_are_read_to_the_letter."""
    with running_server(
        make_tokenizer(tmp_path), access=AccessPolicy(hosts=("mine.example",))
    ) as server:
        for host in (
            "LOCALHOST:80",
            "127.0.0.1:8000",
            "[::1]:8000",
            "192.168.1.5",
            "mine.example:1",
        ):
            for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
                assert httpx.get(server.url + MODELS, headers=headers).status_code == 200


def test_pages_of_others_are_refused(tmp_path: Path) -> None:
    cases = [
        {"host": host}
        for host in (
            "evil.example",
            "evil.example:8000",
            "127.0.0.1.evil.example",
            "",
            "1.2.3",
            "[",
        )
    ]
    origins = ("https://evil.example", "null", "http://localhost.evil.example", "file://", "")
    cases += [{"host": "localhost", "origin": origin} for origin in origins]
    with (
        running_server(make_tokenizer(tmp_path)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        for headers in cases:
            for answer in (
                http.get(MODELS, headers=headers),
                http.post("/v1/completions", headers=headers, json={}),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    403,
                    "host_not_allowed",
                ), headers
                assert "evil" not in answer.text
            assert http.get("/health/live", headers=headers).status_code == 200
        assert not server.engine.submitted
    with running_server(make_tokenizer(tmp_path), access=AccessPolicy(hosts=("*",))) as server:
        assert (
            httpx.get(
                server.url + MODELS, headers={"host": "any.example", "origin": "null"}
            ).status_code
            == 200
        )


@pytest.mark.parametrize(
    ("host", "origin", "comes_in"),
    [
        (
            "127.0.0.1:8000",
            "http://203.0.113.5",
            False,
        ),  # anybody may serve a page from an address of his own
        ("127.0.0.1:8000", "http://192.168.1.9:8000", False),
        ("[::1]:8000", "https://[2001:db8::9]", False),
        ("localhost:8000", "http://0.0.0.0:8000", False),
        (None, "http://203.0.113.5", False),
        ("192.168.1.5:8000", "http://192.168.1.5:3000", True),
        ("[2001:db8::1]:8000", "http://[2001:db8:0::1]", True),
        ("192.168.1.5", "http://127.0.0.1:3000", True),
        ("localhost", "http://[::1]:5173", True),
        ("127.0.0.1", "http://198.51.100.7:81", True),  # these two were allowed
        ("127.0.0.1", "http://[2001:db8::7]", True),
    ],
)
def test_pages_that_addresses_serve(host: str | None, origin: str, comes_in: bool) -> None:
    keeper = gate(AccessPolicy(hosts=check_hosts(["198.51.100.7", "2001:DB8:0::7"])))
    headers = [(b"origin", origin.encode())] + (
        [(b"host", host.encode())] if host is not None else []
    )
    if comes_in:
        assert keeper.find(headers) is None
    else:
        with pytest.raises(HttpError, match="--allowed-host"):
            keeper.find(headers, may_lack_host=True)


def test_two_hosts_are_no_host() -> None:
    keeper, host = gate(AccessPolicy()), (b"host", b"localhost:8000")
    assert keeper.find([host]) is None
    with pytest.raises(HttpError, match="Host header"):
        keeper.find([host, host])


AUTHORITIES = [
    "localhost",
    "LocalHost.",
    "localhost:0",
    "localhost:65535",
    "localhost:",
    "127.0.0.1",
    "[::1]:80",
    "[::FFFF:7f00:1]",
]
NO_AUTHORITIES = [
    "[::1].evil",
    "[::1]evil",
    "[::1]evil:80",
    "[::1]:80.evil",
    "[::1",
    "::1",
    "::1]:80",
    "[[::1]]",
    "[]",
    "[localhost]",
    "[127.0.0.1]",
    "[abc]",
    "[::1%lo]",
    "[::1%25lo]",
    "[::1%25.evil]",
    "[v1.::1]",
    "[::1] ",
    "localhost:80@evil.example",
    "localhost@evil.example",
    "evil@localhost",
    ":@localhost",
    "@localhost",
    "localhost@",
    "localhost..",
    ".localhost",
    ".",
    "127.0.0.1.",
    "127.0.0.1..",
    "localhost.:80.",
    "local..host",
    "localhost:65536",
    "localhost:99999",
    "localhost:000080",
    "localhost:-1",
    "localhost:+80",
    "localhost:8e1",
    "localhost:80:80",
    "localhost::80",
    "localhost:80 ",
    "localhost:evil",
    "localhost:\xb2",
    ":80",
    ":",
    "",
    " ",
    " localhost",
    "localhost ",
    "local host",
    "localhost\t",
    "localhost\n",
    "localhost\x00.evil",
    "localhost%2eevil",
    "%6cocalhost",
    "localhost%00",
    "%00",
    "localhost/evil",
    "localhost/",
    "localhost?",
    "localhost#",
    "localhost\\@evil",
    "localhost,evil",
    "localhost;evil",
    "l\xf6calhost",
    "localhost\xad",
    "127.1",
    "0x7f.0.0.1",
    "2130706433",
    "0177.0.0.1",
    "127.0.0.01",
    "127.0.0.256",
    "127.0.0.1evil",
    "127.0.0.1:80.evil",
]


@pytest.mark.parametrize("authority", AUTHORITIES)
def test_hosts_are_read_to_the_letter(authority: str) -> None:
    keeper, host = gate(AccessPolicy()), authority.encode("latin-1")
    for scheme in (b"http", b"HTTPS", b"app"):
        assert keeper.find([(b"host", host), (b"origin", scheme + b"://" + host)]) is None


@pytest.mark.parametrize("authority", NO_AUTHORITIES)
def test_what_only_resembles_a_host_is_refused(authority: str) -> None:
    keeper, strange = gate(AccessPolicy()), authority.encode("latin-1")
    with pytest.raises(HttpError, match="Host header"):
        keeper.find([(b"host", strange)])
    for headers in ([(b"host", b"localhost")], []):
        with pytest.raises(HttpError, match="pages of other"):
            keeper.find([*headers, (b"origin", b"http://" + strange)], may_lack_host=True)


@pytest.mark.parametrize(
    "origin",
    [
        "localhost",
        "//localhost",
        "://localhost",
        "http:/localhost",
        "http:localhost",
        "http://http://localhost",
        "NULL",
        " http://localhost",
        "ht tp://localhost",
        "1http://localhost",
        "http:// localhost",
        "http://localhost http://evil",
    ],
)
def test_what_only_resembles_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(HttpError, match="pages of other"):
        gate(AccessPolicy()).find([(b"host", b"localhost"), (b"origin", origin.encode())])


@pytest.mark.parametrize(
    ("keyed", "version", "status"), [(0, "1.1", 403), (0, "1.0", 200), (1, "1.1", 200)]
)
def test_a_host_is_missing_in_http_1_0_alone(
    tmp_path: Path, keyed: int, version: str, status: int
) -> None:
    access = AccessPolicy(keys=gather_keys(["k"] * keyed, None, {}))
    head = f"GET {MODELS} HTTP/{version}\r\nauthorization: Bearer k\r\nconnection: close\r\n\r\n"
    with (
        running_server(make_tokenizer(tmp_path), access=access) as server,
        connect(server.url) as connection,
    ):
        connection.sendall(head.encode())
        said = read_all(connection)
    assert said.split()[1] == str(status).encode() and (b"Host header is missing" in said) == (
        status == 403
    )


@pytest.mark.parametrize(
    ("keyed", "hosts", "asked"),
    [(False, (), True), (False, ("*",), False), (True, (), False), (True, ("api.example",), True)],
)
def test_where_a_host_is_asked(keyed: bool, hosts: tuple[str, ...], asked: bool) -> None:
    keeper = gate(AccessPolicy(keys=gather_keys(["k"], None, {}) if keyed else (), hosts=hosts))
    headers = [(b"host", b"evil.example"), (b"authorization", b"Bearer k")]
    with pytest.raises(HttpError, match="Host header") if asked else contextlib.nullcontext():
        keeper.find(headers)


def test_a_public_address_wants_a_key() -> None:
    open_doors, keyed = AccessPolicy(), AccessPolicy(keys=gather_keys(["k"], None, {}))
    for host in ("0.0.0.0", "::", "", "203.0.113.7"):
        assert not is_loopback(host)
        check_public(host, keyed, allow_no_key=False)
        check_public(host, open_doors, allow_no_key=True)
        with pytest.raises(UsageError, match="--api-key") as refused:
            check_public(host, open_doors, allow_no_key=False)
        assert "--allow-no-key" in str(refused.value) and "\n" not in str(refused.value)
    for host in ("127.0.0.1", "127.8.9.1", "localhost", "::1"):
        assert is_loopback(host)
        check_public(host, open_doors, allow_no_key=False)


def test_the_command_line_says_it_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.cli import app

    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    for words, said in [
        (["--host", "0.0.0.0"], "no API key is set"),
        (
            ["--api-key", ""],
            "API key must be 1 to 512 printable ASCII characters: check --api-key\n",
        ),
        (["--api-key", "a", "--api-key", "a"], "two API keys are the same: leave one out"),
        (["--api-key-file", "/nowhere/keys.toml"], "cannot be read"),
        (["--allowed-host", "http://x"], "--allowed-host takes a name"),
    ]:
        ended = CliRunner().invoke(app, ["serve", "no-such-model", *words])
        assert ended.exit_code == 2 and said in ended.output and ended.output.count("\n") == 1, (
            ended.output
        )


def test_serve_takes_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.server.api_server.serve as room

    seen: list[room.Site] = []

    async def note(config: Config, listener: object, site: room.Site, *rest: object) -> None:
        seen.append(site)

    monkeypatch.setattr(room, "_serve", note)
    monkeypatch.setenv("PENSTOCK_API_KEY", "from-env")
    room.serve(Config.of(), host="0.0.0.0", port=0)
    room.serve(Config.of(), port=0, api_key="given")
    assert [[key.digest for key in site.access.keys] for site in seen] == [
        [digest("from-env")],
        [digest("given")],
    ]
    assert "from-env" not in repr(seen)


def test_a_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        '[[key]]\nname = "ann"\nkey = "a-key"\nmax_num_queued_reqs = 8\n\n'
        f'[[key]]\nname = "bob"\nsha256 = "{digest("b")}"\n'
    )
    ann, bob = gather_keys((), file, {"PENSTOCK_API_KEY": "not this one"})
    assert ann == Key(name="ann", digest=digest("a-key"), number=1, max_num_queued_reqs=8)
    assert bob == Key(name="bob", digest=digest("b"), number=2)
    assert [find_key([ann, bob], shown) for shown in (b"b", b"a-key", b"a")] == [bob, ann, None]
    assert len(gather_keys(["third"], file, os.environ)) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "x = 1",
        "key = 1",
        "key = []",
        "[[key]]",
        '[[key]]\nname = ""\nkey = "k"',
        '[[key]]\nname = "a"',
        '[[key]]\nname = "a"\nkey = 7',
        '[[key]]\nname = "a"\nkey = "schlüssel"',
        '[[key]]\nname = "a"\nkey = " k"',
        '[[key]]\nname = "a"\nkey = "k"\nsha256 = "00"',
        '[[key]]\nname = "a"\nsha256 = "00"',
        '[[key]]\nname = "a"\nkey = "k"\nlimit = 1',
        '[[key]]\nname = "a"\nkey = "k"\nmax_num_queued_reqs = 0',
        '[[key]]\nname = "a"\nkey = "k"\nmax_num_queued_tokens = true',
        '[[key]]\nname = "a"\nkey = "k"\n[[key]]\nname = "a"\nkey = "l"',
        '[[key]]\nname = "a"\nkey = "k"\n[[key]]\nname = "b"\nkey = "k"',
        "\xff",
    ],
)
def test_key_files_that_cannot_be(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError) as refused:
        gather_keys((), file, {})
    assert "schl" not in str(refused.value) and str(tmp_path) not in str(refused.value)


def test_a_key_file_says_where_and_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.cli import app

    file, start = tmp_path / "keys.toml", '[[key]]\nname = "a"\nkey = "s3cret"\n'
    limit = "max_num_queued_reqs"
    for text, said in [
        (
            f"{start}{limit[:-1]} = 2",
            f"unknown field {limit[:-1]}=; it takes name=, key=, sha256=, {limit}=",
        ),
        (
            f"{start}{limit} = 0",
            f"[[key]] number 1 of the API key file cannot be: Expected int >= 1 - at {limit}=",
        ),
        ('[keys.app]\nkey = "s3cret"', 'write [[key]], and below it name = "app" and key = "..."'),
        (f"{start}s3cret\n", "not TOML in UTF-8 (line 4, column"),
        (f"{start}# \xff", "not TOML in UTF-8 (line 4)"),
        (start.replace("s3cret", " s3cret"), "space: check [[key]] number 1 of the API key file"),
    ]:
        file.write_bytes(text.encode("latin-1"))
        ended = CliRunner().invoke(app, ["serve", "no-such-model", "--api-key-file", str(file)])
        assert ended.exit_code == 2 and said in ended.output and "s3cret" not in ended.output, (
            ended.output
        )
    monkeypatch.setenv("PENSTOCK_API_KEY", "")
    ended = CliRunner().invoke(app, ["serve", "no-such-model"])
    assert ended.exit_code == 2 and "check PENSTOCK_API_KEY, or unset it\n" in ended.output


def test_names_of_hosts() -> None:
    assert check_hosts(["API.Example.", "*", "2001:DB8:0::1"]) == (
        "api.example",
        "*",
        "2001:db8::1",
    )
    no_names = (
        "",
        ".",
        "http://x",
        "a:80",
        "[::1]",
        "1.2.3.4:80",
        "a b",
        "*.x",
        "ä.example",
        "a..b",
        "a%2eb",
    )
    for host in (*no_names, "fe80::1%eth0"):
        with pytest.raises(UsageError):
            check_hosts([host])


# --- what keys are called: what belongs to a key (files, batches) belongs to its name


def name_of(key: str) -> str:
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:8]


def test_a_key_is_called_the_same_whatever_stands_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[key]]\nname = "team"\nkey = "d"\n')
    for count in (1, 2, 3):
        for given in itertools.permutations(["a", "b", "c"], count):
            for named in (None, file):
                found = {key.name: key.digest for key in gather_keys(given, named, {})}
                assert found.pop("team", None) == (
                    None if named is None else hashlib.sha256(b"d").hexdigest()
                )
                assert found == {
                    name_of(key): hashlib.sha256(key.encode()).hexdigest() for key in given
                }


def test_the_environments_key_is_called_as_an_options() -> None:
    assert gather_keys((), None, {ENVIRONMENT: "a"}) == gather_keys(["a"], None, {})


def test_a_file_names_a_key_that_was_an_option_before(tmp_path: Path) -> None:
    """So a key may change and keep its files."""
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "{name_of("old")}"\nkey = "new"\n')
    (key,) = gather_keys((), file, {})
    assert key.name == name_of("old") and key.digest == hashlib.sha256(b"new").hexdigest()
    with pytest.raises(UsageError, match="same name"):
        gather_keys(["old"], file, {})
