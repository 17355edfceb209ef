"""What an operator or a training loop has done to a running server: other weights, an empty prefix cache, restarts.

Where there are keys, an admin's. It knows requests and the engine's client; no answers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.control import PREFIX_CACHE, WEIGHTS
from penstock.errors import CheckpointError
from penstock.server.online.app_state import AppState
from penstock.server.online.auth import key_of
from penstock.server.online.buffered import json_response
from penstock.server.openai.forms import read_object
from penstock.server.openai.http_errors import HttpError


class UpdateWeightsForm(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """model_path: a folder that the engine can read.   weights_version: what answers are stamped with from here on,
    null: the folder's name.   mode: `wait` for what runs, or `keep` it going with the new weights."""

    model_path: str
    weights_version: str | None = None
    mode: Literal["wait", "keep"] = "wait"


async def post_update_weights(state: AppState, request: Request) -> Response:
    """POST /update_weights: answers once every engine has them. Raises PenstockError; the old ones stay then."""
    _check_admin(request, "change weights")
    with state.intake.place() as place:
        raw = read_object(await state.intake.read(request, place), state.limits)
    try:
        form = msgspec.convert(raw, UpdateWeightsForm)
    except msgspec.ValidationError as error:
        raise HttpError(f"the body of /update_weights is not as it must be: {error}") from error
    how: dict[str, Any] = {"folder": form.model_path, "version": form.weights_version, "mode": form.mode}
    try:
        await state.client.control(WEIGHTS, **how)
    except CheckpointError as error:  # of the folder, not of this server
        raise HttpError(str(error), param="model_path") from error
    return json_response({"success": True, "weights_version": state.client.weights_version})


async def post_reset_prefix_cache(state: AppState, request: Request) -> Response:
    """POST /reset_prefix_cache: no prompt that comes finds what was computed so far. Raises PenstockError."""
    _check_admin(request, "empty caches")
    await state.client.control(PREFIX_CACHE, mode="keep")
    return json_response({"success": True})


async def get_weights_version(state: AppState, request: Request) -> Response:
    """GET /weights_version: of the answers that begin now."""
    return json_response({"weights_version": state.client.weights_version})


async def post_restart(state: AppState, request: Request) -> Response:
    """POST /admin/restart: all replicas, one at a time. Raises UsageError where there is one alone, HttpError."""
    _check_admin(request, "restart replicas")
    state.client.restart()
    return json_response({"restarting": len(state.client.each())})


def _check_admin(request: Request, what: str) -> None:
    key = key_of(request.scope)
    if key is not None and not key.admin:
        message = f"this key may not {what}: give it `admin = true` in the API key file"
        raise HttpError(message, status=403, code="not_an_admin")
