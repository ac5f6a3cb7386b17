"""Workers from a file: who joins, who drains, and a broken file that changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from mini_lb.lb_stubs import event, stream, until

from radixpd.errors import ConfigError
from radixpd.mini_lb.parts import build_parts
from radixpd.mini_lb.settings import WorkerSpec, parse
from radixpd.mini_lb.workers_file import read_workers

DONE = b"data: [DONE]\n\n"


@pytest.fixture
def file(tmp_path):
    """`file(text or object)`: a file that holds it now, replaced in one step."""

    def write(content: object) -> Path:
        path, new = tmp_path / "workers.yaml", tmp_path / "new"
        new.write_text(content if isinstance(content, str) else json.dumps(content))
        new.rename(path)
        return path

    return write


async def told(lb) -> dict:
    async with lb.http.get("/workers") as response:
        return await response.json()


def fleet_of(lb) -> set[str]:
    return {worker.name for worker in lb.parts.fleet if not worker.draining}


async def test_workers_join_and_leave_with_the_file(stubs, balance, file) -> None:
    a, b, c = await stubs("a", "b", "c")
    path = file({"worker-urls": [a.url, b.url]})
    lb = await balance("--workers-file", str(path))
    await lb.up(2)
    file({"worker-urls": [b.url, c.url]})
    await until(lambda: fleet_of(lb) == {b.url, c.url}, "the fleet is the file's")
    await lb.up(2)
    assert {(await lb.post())["text"] for _ in range(4)} == {"b", "c"}
    assert (await told(lb))["workers_file"] == {"error": None}
    assert not a.visits


def holding(go: asyncio.Event):
    """A script whose stream does not end until it is told."""

    async def script(request, visit):
        return await stream(request, event({"text": "x"}), go, DONE)

    return script


async def test_a_worker_that_is_no_longer_named_finishes_what_it_has(stubs, balance, file) -> None:
    go = asyncio.Event()
    a, b = await stubs("a", "b")
    a.script = holding(go)
    lb = await balance("--workers-file", str(file({"worker-urls": [a.url]})))
    await lb.up(1)
    async with lb.http.post("/generate", json={"text": "a"}) as response:
        await response.content.readuntil(b"\n\n")
        file({"worker-urls": [b.url]})
        await until(lambda: [worker.state(0.0) for worker in lb.parts.fleet] == ["draining", "up"], "it drains")
        assert (await lb.post())["text"] == "b"
        go.set()
        assert await response.read() == DONE
    await until(lambda: [worker.name for worker in lb.parts.fleet] == [b.url], "it has left")


async def test_a_worker_that_comes_back_before_it_has_left_stays(stubs, balance, file) -> None:
    go = asyncio.Event()
    a, b = await stubs("a", "b")
    a.script = holding(go)
    lb = await balance("--workers-file", str(file({"worker-urls": [a.url]})))
    await lb.up(1)
    async with lb.http.post("/generate", json={"text": "a"}) as response:
        await response.content.readuntil(b"\n\n")
        file({"worker-urls": [b.url]})
        await until(lambda: fleet_of(lb) == {b.url}, "it drains")
        file({"worker-urls": [a.url, b.url]})
        await until(lambda: fleet_of(lb) == {a.url, b.url}, "it is back")
        go.set()
        await response.read()
    await until(lb.idle, "all is over")
    assert fleet_of(lb) == {a.url, b.url}


async def test_another_role_joins_when_the_old_one_has_left(stubs, balance, file) -> None:
    go = asyncio.Event()
    a, b = await stubs("a", "b")
    a.script = holding(go)
    lb = await balance("--workers-file", str(file({"worker-urls": [a.url]})))
    await lb.up(1)
    async with lb.http.post("/generate", json={"text": "a"}) as response:
        await response.content.readuntil(b"\n\n")
        file(f"prefill: ['{a.url}', 7001]\ndecode: ['{b.url}']\n")
        await until(lambda: lb.parts.fleet.find(b.url), "the other one joins at once")
        assert lb.parts.fleet.role(a.url) == "regular"
        go.set()
        await response.read()
    await until(lambda: lb.parts.fleet.role(a.url) == "prefill", "it has joined anew")
    assert lb.parts.fleet.find(a.url).spec == WorkerSpec(a.url, "prefill", 7001)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("worker-urls: [", "expected the node content"),
        ("{}", "it names no worker"),
        ("", "it names no worker"),
        ({"worker-urls": []}, "it names no worker"),
        ({"workers": ["http://a"]}, "unknown key workers; the nearest is worker-urls"),
        ({"worker-urls": ["a:1"]}, "give http://HOST:PORT"),
        (f"worker-urls: [1{':59' * 3000}]", "Exceeds the limit"),
        ({"worker-urls": ["http://a", "http://a/"]}, "named twice"),
        ({"prefill": ["http://a"]}, "go together"),
        ({"worker-urls": [{"url": 3}]}, "--worker-urls"),
        ('{"worker-urls": ["http://a"], "worker-urls": ["http://b"]}', "worker-urls is given twice"),
    ],
)
async def test_a_broken_file_changes_nothing(stubs, balance, file, caplog, content, words) -> None:
    (a,) = await stubs("a")
    lb = await balance("--workers-file", str(file({"worker-urls": [a.url]})))
    await lb.up(1)
    path = file(content)
    await until(lambda: lb.parts.workers_file.error, "it is noticed")
    error = (await told(lb))["workers_file"]["error"]
    assert words in error
    assert str(path) not in error
    assert f"--workers-file {path}: {error}; the workers stay as they are" in caplog.text
    assert (await lb.post())["text"] == "a"
    looks = len(a.looks)
    await until(lambda: len(a.looks) > looks + 4, "time passes")
    assert caplog.text.count("stay as they are") == 1
    file({"worker-urls": [a.url]})
    await until(lambda: not lb.parts.workers_file.error, "it is whole again")


async def test_a_file_that_is_gone_changes_nothing(stubs, balance, file) -> None:
    (a,) = await stubs("a")
    path = file({"worker-urls": [a.url]})
    lb = await balance("--workers-file", str(path))
    await lb.up(1)
    path.unlink()
    await until(lambda: lb.parts.workers_file.error == "No such file or directory", "it is noticed")
    assert (await lb.post())["text"] == "a"


async def test_a_pipe_in_its_place_is_not_waited_for(stubs, balance, file, tmp_path) -> None:
    (a,) = await stubs("a")
    path = file({"worker-urls": [a.url]})
    lb = await balance("--workers-file", str(path))
    await lb.up(1)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").rename(path)
    await until(lambda: "no regular file" in lb.parts.workers_file.error, "the fault is seen")
    assert fleet_of(lb) == {a.url}


async def test_workers_of_others_are_left_alone(stubs, balance, file) -> None:
    a, b, c, d = await stubs("a", "b", "c", "d")
    lb = await balance("--worker-urls", a.url, "--workers-file", str(file({"worker-urls": [b.url]})))
    await lb.up(2)
    async with lb.http.post("/workers", json={"url": c.url}) as response:
        assert response.status == 201
    file({"worker-urls": [d.url]})
    await until(lambda: fleet_of(lb) == {a.url, c.url, d.url}, "only the file's own one leaves")


async def test_an_order_to_read_it_again_is_obeyed(stubs, balance, file) -> None:
    """Also where nothing shows that it has changed."""
    a, b = await stubs("a", "b")
    path = file({"worker-urls": [a.url]})
    lb = await balance("--workers-file", str(path), "--health-check-interval-secs", "3600")
    before = path.stat()
    content = path.read_text().replace(a.url, b.url)
    path.write_text(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    lb.parts.hang_up()
    await until(lambda: fleet_of(lb) == {b.url}, "it has been read")


@pytest.mark.parametrize(
    ("flags", "content", "words"),
    [
        ((), None, "No such file or directory"),
        ((), "{}", "it names no worker"),
        (("--worker-urls", "http://a"), {"worker-urls": ["http://a"]}, "named twice"),
        (("--worker-urls", "http://a"), {"prefill": ["http://b"], "decode": ["http://c"]}, "do not go together"),
    ],
)
async def test_a_broken_file_ends_the_start(tmp_path, file, flags, content, words) -> None:
    path = tmp_path / "workers.yaml" if content is None else file(content)
    with pytest.raises(ConfigError) as caught:
        build_parts(parse([*flags, "--workers-file", str(path)]))
    assert str(caught.value).startswith(f"--workers-file {path}: ")
    assert words in str(caught.value)


def test_a_half_of_the_flags_and_a_half_of_the_file(file) -> None:
    found = read_workers(str(file({"decode": ["http://b"]})), [WorkerSpec("http://a", "prefill")])
    assert found == [WorkerSpec("http://b", "decode")]
