"""Reads the rotary embedding of a config.json. No torch.

transformers 4 writes `rope_theta` at the top level, and `rope_scaling`, which is null or an object
with `type` or `rope_type`. transformers 5 writes all of it in `rope_parameters`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.json_keys import ANYTHING, MOST, REQUIRED, Keys
from penstock.layers.rope_config import RopeConfig

DEFAULT_THETA = 10_000.0
# Keys with harmless values. The mrope keys divide a head among three coordinates of an image's
# position, which are equal for text.
_HARMLESS = {"partial_rotary_factor": 1.0, "mrope_section": ANYTHING, "mrope_interleaved": ANYTHING}


def read_rope(
    keys: Keys,
    max_position_embeddings: int,
    width: int,
    *,
    theta: float = DEFAULT_THETA,
    part: float | None = None,
    neighbours: bool = False,
    proportional: bool = False,
) -> RopeConfig:
    """Reads the rope's keys, at the top level or inside. Raises CheckpointError for a kind or
    number that isn't supported.

    width: of a head. theta: default base. part: default share of a head's numbers that rotate;
    None: the model type always rotates whole heads. neighbours: see RopeConfig. proportional: True
    if the model type may have the kind proportional."""
    rope = keys.part("rope parameters", _rope_object(keys))
    theta = _theta(keys, rope, theta)
    part = 1.0 if part is None else _part(keys, rope, width, part)
    kind = _kind(rope)
    if kind == "default":
        config = RopeConfig(theta=theta)
        # transformers 5 writes this key with any kind
        rope.take("original_max_position_embeddings", None)
    elif kind in ("linear", "dynamic"):
        config = RopeConfig(theta=theta, kind=kind, factor=rope.positive("factor"))  # type: ignore[arg-type]
    elif kind == "proportional" and proportional:
        config = RopeConfig(theta=theta, kind="proportional", factor=rope.positive("factor", 1.0))
    elif kind == "llama3":
        config = _llama3(rope, theta)
    elif kind == "yarn":
        config = _yarn(rope, theta, max_position_embeddings)
    elif kind == "longrope":
        config = _longrope(keys, rope, theta, max_position_embeddings, int(width * part) // 2)
    else:
        raise rope.fail(
            f"rope_type {kind!r} is not supported: supported are default, dynamic, linear, llama3,"
            " longrope, yarn"
        )
    rope.note_rest(_HARMLESS)
    return replace(config, part=part, neighbours=neighbours)


def need_rope(keys: Keys) -> None:
    """Raises CheckpointError if the file has no rope keys. Used for model types whose rope
    transformers stretches by default."""
    if not (keys.rest.get("rope_parameters") or keys.rest.get("rope_scaling")):
        raise keys.fail("key 'rope_parameters' is missing: take the model's complete config.json")


def read_two_ropes(
    keys: Keys,
    positions: int,
    width: int,
    *,
    theta: float,
    local: tuple[str, float] | None = None,
    part: float | None = None,
) -> tuple[RopeConfig, RopeConfig]:
    """Reads the ropes of layers without and with a window, in the spellings of transformers 5 (an
    object per kind of layer) and 4 (one for layers without a window).

    width: of a head. theta: default base. local: transformers 4's key of the base for layers with a
    window, and its default; None: both bases are equal. part: see read_rope."""
    given, local_told = (
        keys.rest.get("rope_parameters"),
        keys.positive(local[0], None) if local else None,
    )
    local_theta = local_told or (local[1] if local else None)
    if not isinstance(given, dict) or not given.keys() & {"full_attention", "sliding_attention"}:
        full = read_rope(keys, positions, width, theta=theta, part=part)
        return full, RopeConfig(theta=local_theta or full.theta)
    keys.take("rope_parameters")
    unknown = given.keys() - {"full_attention", "sliding_attention"}
    if unknown:
        raise keys.fail(
            f"rope_parameters holds {sorted(unknown)[0]!r}: only full_attention and"
            " sliding_attention"
        )
    outer = keys.positive("rope_theta", None)

    def of(kind: str, told: float | None, fallback: float) -> RopeConfig:
        at = keys.part(kind, {"rope_parameters": given.get(kind), "rope_theta": told})
        return read_rope(at, positions, width, theta=fallback, part=part)

    full = of("full_attention", outer, theta)
    return full, of(
        "sliding_attention", local_told if local else outer, local_theta or outer or theta
    )


def stretched_context(rope: RopeConfig) -> int:
    """Returns the context length after stretching by yarn; 0 for other kinds, where
    max_position_embeddings is the context.

    It is needed since users add yarn to Qwen2.5's config as its model card says, where
    max_position_embeddings stays the original length."""
    return int(rope.original_context * rope.factor) if rope.kind == "yarn" else 0


def _rope_object(keys: Keys) -> dict[str, Any]:
    new, old = keys.take("rope_parameters", None), keys.take("rope_scaling", None)
    if new is not None and old is not None and new != old:
        raise keys.fail("rope_parameters and rope_scaling disagree: remove the wrong one")
    given = new if new is not None else old if old is not None else {}
    if not isinstance(given, dict):
        raise keys.fail(f"rope_parameters must be an object, not {given!r}")
    return given


def _part(keys: Keys, rope: Keys, width: int, absent: float) -> float:
    """Returns the share of a head's numbers that rotate, from the rope's object or the top level.
    absent: the default."""
    inner, outer = (
        k.number("partial_rotary_factor", None, above=0.0, high=1.0) for k in (rope, keys)
    )
    part = float(_either(keys, "partial_rotary_factor", inner, outer) or absent)
    if int(width * part) % 2 or not int(width * part):
        raise keys.fail(
            f"partial_rotary_factor {part:g} turns {int(width * part)} numbers of a head: they need"
            " pairs"
        )
    return part


def _theta(keys: Keys, rope: Keys, fallback: float) -> float:
    inner, outer = rope.positive("rope_theta", None), keys.positive("rope_theta", None)
    return float(_either(keys, "rope_theta", inner, outer) or fallback)


def _either(keys: Keys, name: str, inner: float | None, outer: float | None) -> float | None:
    """Returns the value of a key that may be in the rope's object (`inner`) or at the top level
    (`outer`); None if it is in neither. Raises CheckpointError if the two differ."""
    if inner is not None and outer is not None and inner != outer:
        raise keys.fail(
            f"{name} is {outer:g} at the top and {inner:g} inside: remove the wrong one"
        )
    return outer if inner is None else inner


def _kind(rope: Keys) -> str:
    told = {name: rope.text(name, None) for name in ("rope_type", "type")}
    return str(
        rope.same(**{name: "default" if kind == "mrope" else kind for name, kind in told.items()})
        or "default"
    )


def _llama3(rope: Keys, theta: float) -> RopeConfig:
    config = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=rope.positive("factor"),
        original_context=rope.count("original_max_position_embeddings"),
        low_freq_factor=rope.positive("low_freq_factor"),
        high_freq_factor=rope.positive("high_freq_factor"),
    )
    if config.high_freq_factor <= config.low_freq_factor:
        raise rope.fail("high_freq_factor must be above low_freq_factor")
    return config


def _longrope(keys: Keys, rope: Keys, theta: float, positions: int, waves: int) -> RopeConfig:
    outer, inner = (k.count("original_max_position_embeddings", None, low=2) for k in (keys, rope))
    original = int(_either(keys, "original_max_position_embeddings", inner, outer) or positions)
    return RopeConfig(
        theta=theta,
        kind="longrope",
        factor=rope.positive("factor", positions / original),
        original_context=original,
        attention_factor=rope.positive("attention_factor", None),
        short_factors=_factors(rope, "short_factor", waves),
        long_factors=_factors(rope, "long_factor", waves),
    )


def _factors(rope: Keys, name: str, waves: int) -> tuple[float, ...]:
    rule = f"list {waves} numbers, one for each pair of a head's numbers that turns"
    given = rope.listed(name, REQUIRED, waves, rule)
    return tuple(Keys({name: number}, rope.where).positive(name) for number in given)


def _yarn(rope: Keys, theta: float, max_position_embeddings: int) -> RopeConfig:
    config = RopeConfig(
        theta=theta,
        kind="yarn",
        factor=rope.positive("factor"),
        original_context=rope.count("original_max_position_embeddings", max_position_embeddings),
        attention_factor=rope.positive("attention_factor", None),
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        mscale=rope.positive("mscale", None),
        mscale_all_dim=rope.positive("mscale_all_dim", None),
        truncate=rope.flag("truncate", True),
    )
    if theta <= 1.0:  # log(theta) is a divisor
        raise rope.fail(f"rope_theta must be above 1 with yarn, not {theta:g}")
    if config.original_context * config.factor > MOST:
        raise rope.fail(f"factor {config.factor:g} stretches the context beyond {MOST} positions")
    return config
