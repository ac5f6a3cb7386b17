"""A whole API process in one event loop: real application, client and links, with the fake engine at the other end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer
from fake_engine import FakeEngine, make_resolved, write_model
from server.events import parse_events

from radixpd.runtime.client import Client
from radixpd.server.app import build_app
from radixpd.server.connection import Runner
from radixpd.server.process import build_service, open_service
from radixpd.server.service import SERVICE, Service


class Listening(TestServer):
    """The application on the real server's kind of connection."""

    async def _make_runner(self, **options: Any) -> Runner:
        return Runner(self.app, max_header_size=self.app[SERVICE].resolved.settings.server.max_header_size, **options)


@dataclass
class Api:
    """What a test talks to."""

    http: TestClient
    engine: FakeEngine
    service: Service

    async def post(self, path: str, body: Any, *, status: int = 200) -> Any:
        """The JSON answer to a JSON body."""
        response = await self.http.post(path, json=body)
        assert response.status == status, await response.text()
        return await response.json()

    async def generate(self, text: str, **fields: Any) -> Any:
        """The native answer; fields of `sampling_params` by keyword, others in `body`."""
        return await self.post("/generate", {"text": text, "sampling_params": fields.pop("sampling", {}), **fields})

    async def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream, `[DONE]` as a string."""
        response = await self.http.post(path, json={**body, "stream": True})
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return parse_events(await response.text())


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("fake_model"))


@pytest_asyncio.fixture
async def make_api(model_dir: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Api]]]:
    """Builds servers with settings of the test's choice."""
    made: list[Api] = []

    async def make(*, opened: bool = True, directory: Path = model_dir, max_running: int = 64, **settings: Any) -> Api:
        links = tmp_path / str(len(made))
        links.mkdir()
        client = Client(str(links))
        engine = FakeEngine(str(links), max_running=max_running)
        engine.taken_in = lambda steps: client.load.steps_total >= steps
        service = build_service(make_resolved(directory, **settings), client)
        http = TestClient(Listening(build_app(service)))
        await http.start_server()
        api = Api(http, engine, service)
        made.append(api)
        if opened:
            engine.start()
            await open_service(service)
            engine.seen.clear()
        return api

    yield make
    for api in made:
        await api.http.close()
        api.service.client.close()
        api.engine.close()


@pytest_asyncio.fixture
async def api(make_api: Callable[..., Awaitable[Api]]) -> Api:
    return await make_api()
