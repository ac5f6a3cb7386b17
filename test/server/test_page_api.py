"""The web page's files and headers, the look at the cache behind it, and token strings, with the fake engine."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.conftest import Api

from radixpd.config.secret import Secret
from radixpd.config.settings import ServerSettings
from radixpd.core.page_hash import namespace, token_bytes
from radixpd.core.tree_view import OWNERS, CacheView, NodeView
from radixpd.runtime.messages import Control
from radixpd.server import page_api

FOLDER = Path(page_api.__file__).parent / "page"
FILES = sorted(path.name for path in FOLDER.iterdir())
SPACE = namespace({"cache_salt": "tenant"})


def _head(api: Api, text: str) -> bytes:
    return token_bytes(api.service.manager.tokenizer.encode(text))


def _node(**fields: Any) -> NodeView:
    plain = {"id": 3, "parent": None, "pages": 2, "locks": 1, "hits": 4, "age": 5, "children": 0, "space": b"", "head": b""}
    return NodeView(**{**plain, **fields})


def _show(api: Api, *nodes: NodeView) -> CacheView:
    """The engine has these nodes."""
    pages = sum(node.pages for node in nodes)
    api.engine.cache = replace(
        api.engine.cache,
        free_pages=256 - pages,
        tree_pages=pages,
        locked_pages=1,
        runs=[(OWNERS.index("tree"), pages), (OWNERS.index("free"), 256 - pages)],
        nodes=list(nodes),
    )
    return api.engine.cache


async def _look(api: Api, **options: Any) -> Any:
    response = await api.http.get("/cache_tree", **options)
    assert response.status == 200, await response.text()
    return await response.json()


async def test_the_page_and_all_its_files_are_served_under_a_strict_policy(api: Api) -> None:
    for path in ("/", *(f"/page/{name}" for name in FILES if name != "index.html")):
        response = await api.http.get(path)
        assert response.status == 200
        assert await response.read() == (FOLDER / (path.removeprefix("/page/") if path != "/" else "index.html")).read_bytes()
        policy = dict(part.strip().split(" ", 1) for part in response.headers["Content-Security-Policy"].split(";"))
        assert policy.pop("default-src") == "'none'"
        assert set(policy.values()) <= {"'self'", "'none'"}
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        expected = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}.get(Path(path).suffix, "text/html")
        assert response.content_type == expected


@pytest.mark.parametrize("name", ["nothing.js", "index.html", "..%2fapp.py", "%2e%2e/app.py", "page.js%00", ".", "page.js/"])
async def test_nothing_else_is_served(api: Api, name: str) -> None:
    response = await api.http.get(f"/page/{name}")
    assert response.status == 404
    assert (await response.json())["error"]["type"] == "not_found_error"


def test_whatever_the_page_names_is_there() -> None:
    sources = {name: (FOLDER / name).read_text(encoding="utf-8") for name in FILES}
    named = {
        Path(found).name
        for name, source in sources.items()
        for found in re.findall(r'(?:src|href)="page/([^"]+)"' if name.endswith(".html") else r'from "\./([^"]+)"', source)
    }
    assert named == {*FILES} - {"index.html"}
    assert {*page_api.PAGE_FILES} == named


def test_data_never_becomes_markup_and_nothing_comes_from_outside() -> None:
    ways = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|\bstyle=|\bon\w+=\"|srcdoc")
    for name in FILES:
        source = (FOLDER / name).read_text(encoding="utf-8")
        assert not ways.search(source), name
        assert not re.search(r"(https?:)?//[a-z]", source.replace('xmlns="http://www.w3.org/2000/svg"', "")), name


async def test_what_there_is_to_see(api: Api) -> None:
    stem = _node(head=_head(api, "<user>Grüße"), children=1, locks=2)
    _show(api, stem, _node(id=9, parent=3, pages=4, head=_head(api, "x" * 32), space=SPACE))
    seen = await _look(api)
    assert seen["pages"] == {"total": 256, "free": 250, "tree": 6, "locked": 1, "request": 0, "quarantine": 0}
    assert seen["owners"] == list(OWNERS)
    assert seen["page_map"] == {"pages_per_cell": 1, "runs": [[2, 6], [3, 250]]}
    first, second = seen["nodes"]
    assert first == {
        "id": 3, "parent": None, "namespace": "", "tokens": 32, "pages": 2, "locks": 2, "hits": 4, "age": 5, "children": 1,
        "preview": "<user>Grüße", "head": np.frombuffer(stem.head, "<i4").tolist(),
    }  # fmt: skip
    assert second["parent"] == 3
    assert re.fullmatch("[0-9a-f]{8}", second["namespace"])
    # A name that could be computed from a salt would tell who uses which.
    assert second["namespace"] not in SPACE.hex()


async def test_previews_survive_cut_characters_and_ids_without_text(api: Api) -> None:
    cut = _head(api, "aü")[:-4] + token_bytes(np.array([259, 999_999], dtype=np.int32))
    _show(api, _node(head=cut), _node(id=4, head=_head(api, "y" * 32) * 4))
    first, second = (await _look(api))["nodes"]
    assert first["preview"] == "a\ufffd"
    assert second["preview"] == "y" * page_api.PREVIEW


async def test_the_scheduler_is_asked_once_for_many_lookers(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_api, "FRESH", 3600)
    assert all([(await each)["page_size"] == 16 for each in asyncio.as_completed([_look(api) for _ in range(20)])])
    assert [message.action for message in api.engine.of(Control)] == ["cache_tree"]
    monkeypatch.setattr(page_api, "FRESH", 0)


async def test_a_look_is_renewed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_api, "FRESH", 0)
    assert (await _look(api))["nodes"] == []
    _show(api, _node())
    assert len((await _look(api))["nodes"]) == 1


def _secrets(*keys: str) -> tuple[Secret, ...]:
    return tuple(map(Secret, keys))


@pytest.mark.parametrize(
    ("keys", "admin", "shown"),
    [((), (), True), (("one",), (), True), (("one", "two"), (), False), (("one", "two"), ("root",), True), ((), ("root",), True)],
)
async def test_texts_are_left_out_where_several_keys_share_a_server(make_api, keys: Any, admin: Any, shown: bool) -> None:
    api = await make_api(server=ServerSettings(api_key=_secrets(*keys), admin_api_key=_secrets(*admin)))
    _show(api, _node(head=_head(api, "somebody's secret")))
    used = [*keys, *admin]
    seen = await _look(api, headers={"Authorization": f"Bearer {used[-1]}"} if used else {})
    assert seen["texts"] is shown
    (node,) = seen["nodes"]
    assert node["preview"] == ("somebody's secret" if shown else None)
    assert (node["head"] is not None) is shown
    assert node["tokens"] == 32


async def test_where_there_is_an_admin_key_others_see_nothing(make_api) -> None:
    api = await make_api(server=ServerSettings(api_key=_secrets("one"), admin_api_key=_secrets("root")))
    response = await api.http.get("/cache_tree", headers={"Authorization": "Bearer one"})
    assert response.status == 403
    assert "admin key" in (await response.json())["error"]["message"]


def _basic(name: str, password: str) -> str:
    return "Basic " + b64encode(f"{name}:{password}".encode()).decode()


async def test_a_browser_opens_the_page_with_a_password_and_nothing_else(make_api) -> None:
    api = await make_api(server=ServerSettings(api_key=_secrets("one", "two")))
    paths = ("/", "/page/page.js")
    for password, status in (("one", 200), ("two", 200), ("three", 401), ("", 401)):
        for path in paths:
            response = await api.http.get(path, headers={"Authorization": _basic("anybody", password)})
            assert response.status == status
    for header in (
        "Basic",
        "Basic one",
        "Basic !!!",
        "Basic " + b64encode(b"one").decode(),
        "Basic " + b64encode(b"\xff:one").decode(),
        "",
    ):
        response = await api.http.get("/", headers={"Authorization": header})
        assert response.status == 401
        assert response.headers["WWW-Authenticate"].startswith("Basic realm=")
    for route in api.http.app.router.routes():
        path = str(route.resource.canonical).replace("{name}", "page.js").replace("{model}", "fake")
        if path not in (*paths, "/health"):
            response = await api.http.request(route.method, path, headers={"Authorization": _basic("anybody", "one")})
            assert response.status == 401, path
            assert response.headers["WWW-Authenticate"] == "Bearer"


async def test_before_the_engine_is_ready_it_is_a_503(make_api) -> None:
    api = await make_api(opened=False)
    response = await api.http.get("/cache_tree")
    assert response.status == 503
    assert "starting" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("text", ["", "abc", "Grüße, 世界 🙂!", "</s>x</s>"])
async def test_token_strings_join_to_the_text(api: Api, text: str) -> None:
    answer = await api.post("/tokenize", {"text": text, "return_token_strings": True})
    assert "".join(answer["token_strings"]) == text
    assert len(answer["token_strings"]) == answer["count"] == len(answer["tokens"])
    assert not any("\ufffd" in piece for piece in answer["token_strings"])


async def test_token_strings_of_lists_and_conversations(api: Api) -> None:
    answer = await api.post("/tokenize", {"text": ["ü", "", "b"], "return_token_strings": True})
    assert answer["token_strings"] == [["", "ü"], [], ["b"]]
    answer = await api.post("/tokenize", {"messages": [{"role": "user", "content": "hé"}], "return_token_strings": True})
    assert "".join(answer["token_strings"]) == "<user>hé\n<assistant>"
    assert "token_strings" not in await api.post("/tokenize", {"text": "a"})


async def test_token_strings_of_a_long_text_do_not_hold_up_the_loop(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, threads = api.service.manager.tokenizer, []
    stream = tokenizer.stream

    def noted(*args: Any, **options: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            threads.append("other")
        return stream(*args, **options)

    monkeypatch.setattr(tokenizer, "stream", noted)
    text = "ab" * 4000
    monkeypatch.setattr(type(api.service.manager.limits), "longest", 9000)
    answer = await api.post("/tokenize", {"text": text, "return_token_strings": True})
    assert "".join(answer["token_strings"]) == text
    assert threads == ["other"]
