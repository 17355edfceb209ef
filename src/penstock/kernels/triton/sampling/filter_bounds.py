"""Finds the bounds of the sampling filters top_k and top_p without sorting. Tokens are ordered by
logit, the largest first, and equal logits by id. A filter keeps the tokens up to some token; the
bound is that token's (logit, id). A token is inside a bound (value, bound) if its logit is larger
than `value`, or equal and its id is not larger than `bound`. top_k's bound is the k-th token;
top_p's is the last token of the smallest set whose probability reaches top_p.

Common arguments: logits, adjusted, use_adjusted: see `tile_sums.load_tiles`. line: offset of the
row's logits. listed: ids of tiles to read, `count` of them. tile, peak: id and largest logit of
each tile. tiles: number of tiles of a row. top: the row's largest logit. scale2: log2(e) /
temperature. A token's e is exp((its logit - top) / temperature), and mass is the sum of e over
tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.sampling.tile_sums import load_tiles

_LOWEST = tl.constexpr(-3.4028234663852886e38)
# an id above all ids: a bound with it excludes no token with the bound's logit
_ALL_IDS = tl.constexpr(2147483647)


@triton.jit
def _key(value):
    """Maps float32 values to int64 keys that are ordered as the values are."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _value(key, shift):
    """Returns the float32 whose key, without its last `shift` bits, is `key`. shift: 16 for logits
    that are bfloat16, whose last 16 bits are 0."""
    low = tl.where(key < 0, (1 << shift) - 1, 0).to(tl.int64)
    bits = ((key << shift) | low).to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _list(listed, tile, tiles, flags):
    """Writes the ids of the tiles whose flag is set into `listed`, in order; returns their number.
    tile: ids, of which those from `tiles` on are padding."""
    flags = (flags & (tile < tiles)).to(tl.int32)
    place = tl.cumsum(flags, axis=0) - 1
    tl.debug_barrier()  # other threads may still read the previous list
    tl.store(listed + place, tile, mask=flags > 0)
    tl.debug_barrier()
    return tl.sum(flags, axis=0)


@triton.jit
def _some(
    logits,
    adjusted,
    line,
    listed,
    first,
    count,
    vocabulary,
    use_adjusted,
    HAS_ADJUSTED: tl.constexpr,
    SOME: tl.constexpr,
    TILE: tl.constexpr,
):
    """Loads SOME tiles, listed[first] and the following. Returns token ids and logits [SOME, TILE];
    logits are -inf for tiles from listed[count] on."""
    place = first + tl.arange(0, SOME)
    tile = tl.load(listed + place, mask=place < count, other=0)
    token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    there = (place < count)[:, None] & (token < vocabulary)
    return token, load_tiles(logits, adjusted, line, token, there, use_adjusted, HAS_ADJUSTED)


@triton.jit
def _inside(logit, token, value, bound):
    """Returns a mask of the tokens that are inside the bound (value, bound). logit, token: logits
    and ids."""
    return (logit > value) | ((logit == value) & (token <= bound))


@triton.jit
def _masses(
    logits,
    adjusted,
    line,
    listed,
    count,
    value,
    bound,
    floor,
    top,
    scale2,
    vocabulary,
    use_adjusted,
    HAS_ADJUSTED: tl.constexpr,
    SOME: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the mass of the tokens in the listed tiles that are inside the bound (value, bound)
    and whose e is at least `floor`."""
    total = tl.zeros((SOME, TILE), tl.float32)
    for first in range(0, count, SOME):
        token, logit = _some(
            logits,
            adjusted,
            line,
            listed,
            first,
            count,
            vocabulary,
            use_adjusted,
            HAS_ADJUSTED,
            SOME,
            TILE,
        )
        e = tl.exp2((logit - top) * scale2)
        total += tl.where(_inside(logit, token, value, bound) & (e >= floor), e, 0.0)
    return tl.sum(tl.sum(total, axis=1), axis=0)


@triton.jit
def _from(
    logits,
    adjusted,
    line,
    listed,
    count,
    value,
    top,
    scale2,
    vocabulary,
    use_adjusted,
    HAS_ADJUSTED: tl.constexpr,
    SOME: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns three sums over the listed tiles: the number of tokens with logit >= value, the
    number with logit > value, and the mass of the latter."""
    upto = tl.zeros((SOME, TILE), tl.int32)
    more = tl.zeros((SOME, TILE), tl.int32)
    total = tl.zeros((SOME, TILE), tl.float32)
    for first in range(0, count, SOME):
        _, logit = _some(
            logits,
            adjusted,
            line,
            listed,
            first,
            count,
            vocabulary,
            use_adjusted,
            HAS_ADJUSTED,
            SOME,
            TILE,
        )
        upto += (logit >= value).to(tl.int32)
        more += (logit > value).to(tl.int32)
        total += tl.where(logit > value, tl.exp2((logit - top) * scale2), 0.0)
    return (
        tl.sum(tl.sum(upto, axis=1), axis=0),
        tl.sum(tl.sum(more, axis=1), axis=0),
        tl.sum(tl.sum(total, 1), axis=0),
    )


@triton.jit
def _nth_equal(
    logits,
    adjusted,
    line,
    listed,
    count,
    value,
    nth,
    vocabulary,
    use_adjusted,
    HAS_ADJUSTED: tl.constexpr,
    SOME: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the id of the nth token (from 1) whose logit equals `value`, in the listed tiles;
    _ALL_IDS if there are fewer."""
    seen = tl.full((), 0, tl.int32)
    found = tl.full((), _ALL_IDS, tl.int32)
    for first in range(0, count, SOME):
        token, logit = _some(
            logits,
            adjusted,
            line,
            listed,
            first,
            count,
            vocabulary,
            use_adjusted,
            HAS_ADJUSTED,
            SOME,
            TILE,
        )
        equal = (logit == value).to(tl.int32)
        each = tl.sum(equal, axis=1)
        before = tl.cumsum(each, axis=0) - each + seen
        upto = tl.cumsum(equal, axis=1) + before[:, None]
        hit = (equal > 0) & (upto == nth)
        found = tl.minimum(found, tl.min(tl.min(tl.where(hit, token, _ALL_IDS), axis=1), axis=0))
        seen += tl.sum(each, axis=0)
    return found


@triton.jit
def _kth_peak(peak, k, low, high):
    """Returns the key of the k-th largest tile peak, by binary search between the keys low and
    high; low if there are fewer than k tiles with a larger key."""
    keys = _key(peak)
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _top_k_bound(
    logits,
    adjusted,
    line,
    listed,
    tile,
    tiles,
    peak,
    top,
    k,
    scale2,
    vocabulary,
    use_adjusted,
    shift,
    HAS_ADJUSTED: tl.constexpr,
    SOME: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns top_k's bound: logit and id of the k-th token. The k largest logits are in the tiles
    whose peaks are at least the k-th largest peak, so only these are read. shift: see `_value`."""
    high = _key(top) >> shift
    low = _kth_peak(peak, k, _key(tl.full((), float("-inf"), tl.float32)), _key(top))
    low = low >> shift
    count = _list(listed, tile, tiles, peak >= _value(low, shift))
    while low < high:
        middle = low + (high - low + 1) // 2
        upto, _, _ = _from(
            logits,
            adjusted,
            line,
            listed,
            count,
            _value(middle, shift),
            top,
            scale2,
            vocabulary,
            use_adjusted,
            HAS_ADJUSTED,
            SOME,
            TILE,
        )
        low = tl.where(upto >= k, middle, low)
        high = tl.where(upto >= k, high, middle - 1)
    value = _value(low, shift)
    upto, more, _ = _from(
        logits,
        adjusted,
        line,
        listed,
        count,
        value,
        top,
        scale2,
        vocabulary,
        use_adjusted,
        HAS_ADJUSTED,
        SOME,
        TILE,
    )
    bound = tl.full((), _ALL_IDS, tl.int32)
    if upto > k:
        bound = _nth_equal(
            logits,
            adjusted,
            line,
            listed,
            count,
            value,
            k - more,
            vocabulary,
            use_adjusted,
            HAS_ADJUSTED,
            SOME,
            TILE,
        )
    return value, bound


@triton.jit
def _top_p_bound(
    logits,
    adjusted,
    line,
    listed,
    tile,
    tiles,
    peak,
    top,
    lowest,
    allowed,
    scale2,
    vocabulary,
    use_adjusted,
    shift,
    HAS_ADJUSTED: tl.constexpr,
    SOME: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns top_p's bound: logit and id of the last token for which the mass of all tokens before
    it in the order is below `allowed`. lowest: a logit that the bound's logit is not below. shift:
    see `_value`."""
    low, high = _key(lowest) >> shift, _key(top) >> shift
    count = _list(listed, tile, tiles, peak >= lowest)
    while low < high:
        middle = low + (high - low) // 2
        _, _, above = _from(
            logits,
            adjusted,
            line,
            listed,
            count,
            _value(middle, shift),
            top,
            scale2,
            vocabulary,
            use_adjusted,
            HAS_ADJUSTED,
            SOME,
            TILE,
        )
        high = tl.where(above < allowed, middle, high)
        low = tl.where(above < allowed, low, middle + 1)
    value = _value(low, shift)
    upto, more, above = _from(
        logits,
        adjusted,
        line,
        listed,
        count,
        value,
        top,
        scale2,
        vocabulary,
        use_adjusted,
        HAS_ADJUSTED,
        SOME,
        TILE,
    )
    # a token that follows j others of equal logit is kept if above + j * e < allowed
    stay = tl.ceil((allowed - above) / tl.exp2((value - top) * scale2))
    bound = tl.full((), _ALL_IDS, tl.int32)
    if stay < upto - more:
        nth = tl.maximum(stay, 1.0).to(tl.int32)
        bound = _nth_equal(
            logits,
            adjusted,
            line,
            listed,
            count,
            value,
            nth,
            vocabulary,
            use_adjusted,
            HAS_ADJUSTED,
            SOME,
            TILE,
        )
    return value, bound
