"""Handlers of the admin routes. For operators and training loops: update weights, reset the prefix
cache, sleep, restart. If the server has API keys, they need an admin's key. Knows requests and the
engine's client; no texts.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.control import PREFIX_CACHE, SLEEP, UPDATE, WAKE_UP, Control, Mode
from penstock.errors import CheckpointError
from penstock.server.online.app_state import AppState
from penstock.server.online.auth import key_of
from penstock.server.online.buffered import json_response
from penstock.server.online.intake import BodyRoom
from penstock.server.openai.forms import read_object
from penstock.server.openai.http_errors import HttpError
from penstock.shared_weights import SharedStretch, SharedTensor, SharedWeights


class UpdateWeightsForm(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of /update_weights, with either model_path or shared. model_path: a folder that the
    engine can read. shared: weights in the memory of another process on the engine's machine.
    weights_version: version name in later answers; null: the folder's name. mode: `wait` for
    running requests, `keep` them going with the new weights, or `abort` them."""

    model_path: str | None = None
    shared: SharedWeights | None = None
    weights_version: str | None = None
    mode: Mode = "wait"


class Done(msgspec.Struct, kw_only=True):
    """The answer of a change that was made."""

    success: bool = True


class Updated(Done, kw_only=True):
    """The answer of POST /update_weights."""

    weights_version: str


class Slept(Done, kw_only=True):
    """The answer of POST /sleep and /wake_up. asleep: the parts that still sleep."""

    is_sleeping: bool
    asleep: list[str]


class Sleeping(msgspec.Struct):
    """The answer of GET /is_sleeping."""

    is_sleeping: bool


class WeightsVersion(msgspec.Struct):
    """The answer of GET /weights_version."""

    weights_version: str


class Restart(msgspec.Struct):
    """The answer of POST /admin/restart. restarting: number of replicas."""

    restarting: int


async def post_update_weights(state: AppState, request: Request) -> Response:
    """POST /update_weights: answers once every engine has the new weights. Raises PenstockError;
    the old weights then stay."""
    _check_admin(state, request, "change weights")
    with BodyRoom(state.intake.large) as place:
        raw = read_object(await state.intake.read(request, place), state.limits)
    try:
        form = msgspec.convert(raw, UpdateWeightsForm)
    except msgspec.ValidationError as error:
        raise HttpError(f"the body of /update_weights is not as it must be: {error}") from error
    if (form.model_path is None) == (form.shared is None):
        raise HttpError(
            "weights come from model_path or from shared: give one of the two", param="model_path"
        )
    if form.shared is not None:
        _check_known(raw["shared"])
        _check_numbers(form.shared)
    try:
        word = Control(UPDATE, form.mode, form.model_path or "", form.weights_version, form.shared)
        await state.client.control(word)
    except CheckpointError as error:  # status 400, since the weights are wrong and not this server
        raise HttpError(str(error), param="shared" if form.shared else "model_path") from error
    return json_response(Updated(weights_version=state.client.weights_version))


def _check_known(shared: dict[str, Any]) -> None:
    """Raises HttpError for an unknown field in `shared`, since msgspec ignores unknown fields of
    dataclasses."""
    for each, form in (
        ("memories", SharedStretch),
        ("tensors", SharedTensor),
        (None, SharedWeights),
    ):
        known = {field.name for field in fields(form)}
        for told in shared[each] if each else [shared]:
            for name in sorted(told.keys() - known)[:1]:
                raise HttpError(
                    f"shared has an unknown field {name[:80]!r}: leave it out", param="shared"
                )


def _check_numbers(shared: SharedWeights) -> None:
    """Raises HttpError for a number outside the range of memory sizes and of messages to the
    engine."""
    sizes = [("size", memory.size) for memory in shared.memories]
    for tensor in shared.tensors:
        sizes += [
            ("offset", tensor.offset),
            ("memory", tensor.memory),
            *(("shape", length) for length in tensor.shape),
        ]
    for name, value in sizes:
        if not 0 <= value < 2**63:
            raise HttpError(f"shared has a {name} that is not from 0 to 2**63 - 1", param="shared")


async def post_reset_prefix_cache(state: AppState, request: Request) -> Response:
    """POST /reset_prefix_cache: makes later prompts ignore cached prefixes.
    Raises PenstockError."""
    _check_admin(state, request, "empty caches")
    await state.client.control(Control(PREFIX_CACHE, mode="keep"))
    return json_response(Done())


async def post_sleep(state: AppState, request: Request) -> Response:
    """POST /sleep?level=1&mode=wait: frees the device's memory; new requests wait for /wake_up.
    Raises PenstockError."""
    _check_admin(state, request, "put the engine to sleep")
    asked = _query(request, "level", "mode")
    level, named = asked.get("level", ["1"])[-1], asked.get("mode", ["wait"])[-1]
    if level not in ("1", "2"):
        rule = "level must be 1 (weights go to host memory) or 2 (they are dropped)"
        raise HttpError(rule, param="level")
    mode = next((each for each in get_args(Mode) if each == named), None)
    if mode is None:
        rule = (
            "mode must be 'wait' (for what runs), 'keep' (it goes on after the sleep) or 'abort'"
            " (it ends)"
        )
        raise HttpError(rule, param="mode")
    await state.client.control(Control(SLEEP, mode, level=int(level)))
    return _slept(state)


async def post_wake_up(state: AppState, request: Request) -> Response:
    """POST /wake_up?tags=weights&tags=kv_cache: allocates the device's memory again; without tags,
    all of it. Raises PenstockError."""
    _check_admin(state, request, "wake the engine up")
    tags = _query(request, "tags").get("tags")
    await state.client.control(Control(WAKE_UP, mode="keep", tags=tags))
    return _slept(state)


async def get_is_sleeping(state: AppState, request: Request) -> Response:
    """GET /is_sleeping: answers true while the weights or the KV cache of any engine are asleep."""
    return json_response(Sleeping(bool(state.client.asleep)))


def _slept(state: AppState) -> Response:
    """Answers with the parts that still sleep. Weights that were dropped (level 2) sleep until the
    next update."""
    asleep = list(state.client.asleep)
    return json_response(Slept(is_sleeping=bool(asleep), asleep=asleep))


def _query(request: Request, *names: str) -> dict[str, list[str]]:
    """Returns the query parameters by name. Raises HttpError for a parameter that is not in
    `names`."""
    found: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        if name not in names:
            raise HttpError(
                f"there is no parameter {name!r} here: there is {' and '.join(names)}", param=name
            )
        found.setdefault(name, []).append(value)
    return found


async def get_weights_version(state: AppState, request: Request) -> Response:
    """GET /weights_version: answers the version name of the weights in use."""
    return json_response(WeightsVersion(state.client.weights_version))


async def post_restart(state: AppState, request: Request) -> Response:
    """POST /admin/restart: restarts all replicas, one at a time. Raises UsageError if there is only
    one, HttpError."""
    _check_admin(state, request, "restart replicas")
    state.client.restart()
    return json_response(Restart(len(state.client.each())))


def _check_admin(state: AppState, request: Request, what: str) -> None:
    key = key_of(request.scope)
    if key is None and not state.admin_without_key:
        message = (
            f"nobody may {what} without an API key: start the server with --api-key, or with"
            " --allow-admin-without-key where something in front of it checks who asks"
        )
        raise HttpError(message, status=403, code="not_an_admin")
    if key is not None and not key.admin:
        message = f"this key may not {what}: give it `admin = true` in the API key file"
        raise HttpError(message, status=403, code="not_an_admin")
