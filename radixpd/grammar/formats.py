"""The `format`s of strings that a grammar can promise, as patterns of the whole string. Pure. Called by `schema`."""

from __future__ import annotations

__all__ = ["FORMATS"]

DATE = r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
DATE = DATE.replace("[0-9]{4}", "(19|20)[0-9]{2}", 1)
TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
LABEL = r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?"
HEX = "[0-9a-f]"

FORMATS = {
    "date": f"^{DATE}$",
    "time": f"^{TIME}$",
    "date-time": f"^{DATE}T{TIME}$",
    "duration": r"^P([0-9]{1,3}D|T([0-9]{1,3}H|[0-9]{1,3}M|[0-9]{1,3}S)|[0-9]{1,2}Y|[0-9]{1,2}M|[0-9]{1,2}W)$",
    "uuid": f"^{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}$",
    "ipv4": rf"^{OCTET}(\.{OCTET}){{3}}$",
    "ipv6": f"^{HEX}{{1,4}}(:{HEX}{{1,4}}){{7}}$",
    "hostname": rf"^{LABEL}(\.{LABEL}){{0,4}}$",
    "email": rf"^[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,32}}){{0,2}}@{LABEL}(\.{LABEL}){{1,3}}$",
    "uri": rf"^https?://{LABEL}(\.{LABEL}){{1,3}}(/[A-Za-z0-9._~-]{{0,32}}){{0,8}}$",
}
