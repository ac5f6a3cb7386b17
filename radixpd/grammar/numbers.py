"""Numbers between two bounds as EBNF. Pure. Called by `schema`.

Without bounds a number has at most `DIGITS` digits before and after its point: more would only be noise, and a model that does not stop
would write digits for ever.
"""

from __future__ import annotations

from decimal import Decimal

from radixpd.grammar.errors import GrammarError

__all__ = ["DIGITS", "INTEGER", "LONGEST", "NUMBER", "between", "decimals_between"]

DIGITS = 15
LARGEST = 10**DIGITS - 1
PLACES = 6  # most digits behind the point of a bound
LONGEST = 40  # digits of a bound, which `schema` checks
INTEGER = f'"-"? ("0" | [1-9] [0-9]{{0,{DIGITS - 1}}})'
NUMBER = INTEGER + f' ("." [0-9]{{1,{DIGITS}}})? ([eE] [-+]? [0-9]{{1,2}})?'


def between(low: int | None, high: int | None) -> str:
    """All integers of a closed range."""
    low = min(-LARGEST, high if high is not None else 0) if low is None else low
    high = max(LARGEST, low) if high is None else high
    _check(low, high)
    options = [f'"-" {_group(part)}' for part in _natural(max(1, -high), -low)] if low < 0 else []
    options += _natural(max(0, low), high) if high >= 0 else []
    return " | ".join(options)


def decimals_between(low: Decimal | None, high: Decimal | None, *, open_low: bool, open_high: bool) -> str:
    """Numbers of a range: its integers, any fraction between two integers of it, and decimals with the bounds' own number of digits."""
    if low is None and high is None:
        return NUMBER
    least = Decimal(-LARGEST) if low is None else low
    most = Decimal(LARGEST) if high is None else high
    if low is None:
        least = min(least, most)
    if high is None:
        most = max(most, least)
    places = max(1, *(-int(bound.as_tuple().exponent) for bound in (least, most)))
    if places > PLACES:
        raise GrammarError(f"a bound may have {PLACES} digits behind its point")
    first, last = _inner(least, 0, open_low, up=True), _inner(most, 0, open_high, up=False)
    options = [between(first, last)] if first <= last else []
    first, last = _inner(least, places, open_low, up=True), _inner(most, places, open_high, up=False)
    if first < 0 and first <= last:
        options += [f'"-" {_group(part)}' for part in _decimals(max(1, -last), -first, places)]
    if last >= 0 and first <= last:
        options += _decimals(max(0, first), last, places)
    if not options:
        raise GrammarError("no number lies between minimum and maximum")
    return " | ".join(options)


def _decimals(first: int, last: int, places: int) -> list[str]:
    """Options for numbers with a point from `first` to `last` units of `10 ** -places`, both at least 0."""
    if first > last:
        return []
    unit = 10**places
    (low, least), (high, most) = divmod(first, unit), divmod(last, unit)
    if low == high:
        return [f'"{low}." {_group(_same(_padded(least, places), _padded(most, places)))}']
    more = f"[0-9]{{0,{DIGITS - places}}}"
    options = [f'"{low}." {_group(_same(_padded(least, places), "9" * places))} {more}']
    if low + 1 < high:
        options += [f'{_group(part)} "." [0-9]{{1,{DIGITS}}}' for part in _natural(low + 1, high - 1)]
    return [*options, f'"{high}." {_group(_same("0" * places, _padded(most, places)))}']


def _padded(number: int, places: int) -> str:
    return str(number).zfill(places)


def _inner(bound: Decimal, places: int, open_end: bool, *, up: bool) -> int:
    """The first number of units inside the bound."""
    scaled = bound.scaleb(places)
    whole = int(scaled.to_integral_value(rounding="ROUND_CEILING" if up else "ROUND_FLOOR"))
    if open_end and Decimal(whole) == scaled:
        whole += 1 if up else -1
    return whole


def _check(low: int, high: int) -> None:
    if low > high:
        raise GrammarError("no integer lies between minimum and maximum")


def _natural(low: int, high: int) -> list[str]:
    """Options for all integers `0 <= low .. high`."""
    options = []
    length = len(str(low))
    while length <= len(str(high)):
        least = max(low, 10 ** (length - 1) if length > 1 else 0)
        most = min(high, 10**length - 1)
        if length > 1 and least == 10 ** (length - 1) and most == 10**length - 1:
            end = length
            while high >= 10 ** (end + 1) - 1:
                end += 1
            options.append(f"[1-9] [0-9]{{{length - 1},{end - 1}}}")
            length = end + 1
            continue
        if least <= most:
            options.append(_same(str(least), str(most)))
        length += 1
    return options


def _same(low: str, high: str) -> str:
    """All digit strings of one length between two."""
    if low == high:
        return f'"{low}"'
    if len(low) == 1:
        return f"[{low}-{high}]"
    if low[0] == high[0]:
        return f'"{low[0]}" {_group(_same(low[1:], high[1:]))}'
    rest = len(low) - 1
    zeros, nines = "0" * rest, "9" * rest
    first, last = int(low[0]), int(high[0])
    options = []
    if low[1:] != zeros:
        options.append(f'"{first}" {_group(_same(low[1:], nines))}')
        first += 1
    tail = []
    if high[1:] != nines:
        tail.append(f'"{last}" {_group(_same(zeros, high[1:]))}')
        last -= 1
    if first <= last:
        options.append(f"[{first}-{last}] [0-9]{{{rest}}}")
    return " | ".join(options + tail)


def _group(part: str) -> str:
    return f"({part})" if " | " in part else part
