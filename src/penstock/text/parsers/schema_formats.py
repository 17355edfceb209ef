"""Regexes of JSON Schema's string formats. They match strings without quotes, in the
syntax of Rust's regex library.

Sources: RFC 3339 (date, time, duration), RFC 5321 (email), RFC 1123 (hostname), RFC 4291 (ipv6),
RFC 4122 (uuid), RFC 3986 (uri). Knows texts only.
"""

from __future__ import annotations

_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_MONTH_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:[0-9]{{4}}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_DAYS = r"[0-9]+(?:Y(?:[0-9]+M(?:[0-9]+D)?)?|M(?:[0-9]+D)?|D)"
_HOURS = r"T[0-9]+(?:H(?:[0-9]+M(?:[0-9]+S)?)?|M(?:[0-9]+S)?|S)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_HEX = "[0-9A-Fa-f]"
# IPv6 addresses with `::` in the middle: groups before it, and up to the remaining number after it
_SHORT = "|".join(
    f"(?:{_GROUP}:){{1,{7 - behind}}}(?::{_GROUP}){{1,{behind}}}" for behind in range(1, 7)
)
_IPV6 = rf"(?:{_GROUP}:){{7}}{_GROUP}|{_SHORT}|:(?::{_GROUP}){{1,7}}|(?:{_GROUP}:){{1,7}}:|::"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]+",
}
