"""Stub workers and balancers that end with the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest_asyncio
from mini_lb.lb_stubs import Lb, Stub


@pytest_asyncio.fixture
async def stubs() -> AsyncIterator[Callable[..., Awaitable[list[Stub]]]]:
    """`await stubs("a", "b")`: running workers of these names."""
    made: list[Stub] = []

    async def start(*names: str, **options: object) -> list[Stub]:
        new = [await Stub(name, **options).start() for name in names]
        made.extend(new)
        return new

    yield start
    for stub in made:
        await stub.stop()


@pytest_asyncio.fixture
async def balance() -> AsyncIterator[Callable[..., Awaitable[Lb]]]:
    """`await balance(*flags)`: a running balancer."""
    made: list[Lb] = []

    async def start(*flags: str) -> Lb:
        made.append(await Lb.start(*flags))
        return made[-1]

    yield start
    for lb in made:
        await lb.close()
