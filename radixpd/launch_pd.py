"""`python -m radixpd.launch_pd --model-path M --prefill 1 --decode 1`: a whole prefill/decode group on one machine, as one command.

Arguments -> one command line for each server and the load balancer -> `CommandGroup`. Flags of `launch_server` are for every server,
except --host and --port, which are the load balancer's. Invariants: the servers listen on loopback only and share a secret that is drawn
here and never shown; each tells the load balancer alone what it has cached; pool and threads that no flag sets are divided. Exit codes
are those of `launch_server`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from radixpd.config import cli
from radixpd.config.settings import Settings
from radixpd.errors import ConfigError

__all__ = ["Group", "Shares", "balancer_file", "main", "parse", "server_flags"]

LOOPBACK = "127.0.0.1"
MOST_SERVERS = 64  # of each role
OURS = ("disaggregation-mode", "disaggregation-bootstrap-port")
ASK_TIMEOUT = 2.0
STOP_GRACE = 15.0  # seconds on top of the drain timeout, for what follows a drain

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Group:
    """What the command line asks for. `common`: flags of every server; `settings`: what they mean, with the load balancer's address."""

    prefill: int
    decode: int
    common: tuple[str, ...]
    prefill_args: tuple[str, ...]
    decode_args: tuple[str, ...]
    lb_args: tuple[str, ...]
    settings: Settings

    @property
    def servers(self) -> int:
        """How many."""
        return self.prefill + self.decode

    def args(self, role: str) -> tuple[str, ...]:
        """Flags of one role, common ones first."""
        return (*self.common, *(self.prefill_args if role == "prefill" else self.decode_args))


@dataclass(frozen=True, slots=True)
class Shares:
    """What each server gets of the machine where no flag says otherwise, and the seed that all share (a dummy model's weights)."""

    pool_tokens: int
    threads: int
    seed: int


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def parse(argv: Sequence[str]) -> Group:
    """`argv` without the program's name; every flag is checked before anything starts."""
    parser = _Parser(
        prog="python -m radixpd.launch_pd",
        usage="python -m radixpd.launch_pd --model-path MODEL [--prefill N] [--decode N] [flags]",
        description="Serve a model on prefill and decode servers of this machine, behind a load balancer on --host and --port.",
        epilog="Every flag of `python -m radixpd.launch_server --help` may be given; it is for all servers.",
        allow_abbrev=False,
    )
    parser.add_argument("--prefill", default="1", metavar="N", help="prefill servers (default: 1)")
    parser.add_argument("--decode", default="1", metavar="N", help="decode servers (default: 1)")
    parser.add_argument("--prefill-args", default="", metavar="FLAGS", help='further flags of prefill servers, as one word: "--threads 2"')
    parser.add_argument("--decode-args", default="", metavar="FLAGS", help="further flags of decode servers")
    parser.add_argument("--lb-args", default="", metavar="FLAGS", help="further flags of the load balancer (radixpd.mini_lb)")
    known, common = parser.parse_known_args(argv)
    group = Group(
        prefill=_count("--prefill", known.prefill),
        decode=_count("--decode", known.decode),
        common=tuple(common),
        prefill_args=_words("--prefill-args", known.prefill_args),
        decode_args=_words("--decode-args", known.decode_args),
        lb_args=_words("--lb-args", known.lb_args),
        settings=cli.parse(common),
    )
    _refuse_chosen("", group.common, OURS)
    _refuse_chosen("--prefill-args: ", group.prefill_args, (*OURS, "host", "port"))
    _refuse_chosen("--decode-args: ", group.decode_args, (*OURS, "host", "port"))
    _refuse_chosen("--lb-args: ", group.lb_args, ("config", "worker-urls", "prefill", "decode", "host", "port"))
    for role in ("prefill", "decode"):
        cli.parse(group.args(role))
    if group.lb_args:
        from radixpd.mini_lb.settings import read

        read(group.lb_args)
    if group.settings.server.port == 0:
        raise ConfigError("--port 0: give the load balancer a port that clients can know")
    return group


def _refuse_chosen(where: str, words: Sequence[str], names: Sequence[str]) -> None:
    for word in words:
        if (name := word.partition("=")[0].removeprefix("--")) in names and word.startswith("--"):
            raise ConfigError(f"{where}--{name} is chosen by launch_pd")


def _count(flag: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST_SERVERS:
        raise ConfigError(f"{flag} {text}: it must be an integer from 1 to {MOST_SERVERS}")
    return int(text)


def _words(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def server_flags(group: Group, role: str, *, port: int, bootstrap_port: int, shares: Shares, events: str) -> list[str]:
    """The command line of one server; what stands last wins. `events`: what the paths of its sockets for KV events begin with."""
    settings = cli.parse(group.args(role))
    flags = [*group.args(role), "--host", LOOPBACK, "--port", str(port)]
    flags += ["--disaggregation-mode", role, "--disaggregation-bootstrap-port", str(bootstrap_port)]
    if settings.cache.max_total_tokens is None and settings.cache.mem_fraction_static is None:
        flags += ["--max-total-tokens", str(shares.pool_tokens)]
    if settings.engine.threads is None:
        flags += ["--threads", str(shares.threads)]
    if settings.engine.random_seed is None:
        flags += ["--random-seed", str(shares.seed)]
    if settings.cache.kv_events_config is None and not settings.cache.disable_radix_cache:
        # Events tell the prompts' tokens: only who may enter the group's directory hears them.
        told = {"publisher": "zmq", "endpoint": f"ipc://{events}-events", "replay_endpoint": f"ipc://{events}-replay"}
        flags += ["--kv-events-config", json.dumps(told)]
    if role == "decode" and not settings.disaggregation.disaggregation_peers:
        flags += ["--disaggregation-peers", LOOPBACK]
    return flags


def balancer_file(group: Group, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> dict[str, Any]:
    """What the load balancer's --config holds. `prefill`: ports for HTTP and for handoffs; `decode`: ports for HTTP."""
    server, observe = group.settings.server, group.settings.observe
    keys, admins = ([key.reveal() for key in each] for each in (server.api_key, server.admin_api_key))
    workers = [word for port, bootstrap in prefill for word in (f"http://{LOOPBACK}:{port}", bootstrap)]
    found = {
        "host": server.host,
        "port": server.port,
        "prefill": workers,
        "decode": [f"http://{LOOPBACK}:{port}" for port in decode],
        "api-key": keys,
        "admin-api-key": admins,
        "worker-api-key": next(iter((*admins, *keys)), None),
        "forward-api-key": server.salt_from_key,
        "max-body-size": server.max_body_size,
        "max-header-size": server.max_header_size,
        "body-timeout": server.body_timeout,
        "request-timeout": server.request_timeout,
        "drain-timeout": server.drain_timeout,
        "log-level": observe.log_level,
        "log-format": observe.log_format,
    }
    return {name: value for name, value in found.items() if value not in (None, [])}


def _shares(group: Group) -> Shares:
    """Prepares the model, so that the servers find it ready, and divides the machine."""
    from radixpd.config.resolve import read_machine_facts, resolve
    from radixpd.runtime.supervisor import decide

    whole = decide(group.settings)
    machine = read_machine_facts()
    part = replace(machine, available_memory=machine.available_memory // group.servers)
    try:
        one = resolve(
            group.settings,
            directory=whole.directory,
            tokenizer_directory=whole.tokenizer_directory,
            model=whole.model,
            machine=part,
            seed=0,
        )
    except ConfigError as error:
        raise ConfigError(f"for each of the {group.servers} servers: {error}") from None
    pages = max(1, min(one.pages, whole.pages // group.servers))
    return Shares(pages * whole.page_size, max(1, machine.cores // group.servers), secrets.randbits(62))


def _free_ports(count: int, held: ExitStack) -> Iterator[int]:
    """Ports that stay ours: sockets that are bound and do not listen keep others away, and let a server in that binds as ours do."""
    for _ in range(count):
        holder = held.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]


def _environment(settings: Settings, variable: str) -> dict[str, str]:
    """Of the servers: with a secret, unless there is one."""
    given = settings.disaggregation.disaggregation_secret_file is not None or variable in os.environ
    return {**os.environ, **({} if given else {variable: secrets.token_hex(32)})}


def _all_up(settings: Settings, count: int) -> bool:
    """Whether the load balancer sees every server."""
    keys = (*settings.server.admin_api_key, *settings.server.api_key)
    headers = {"Authorization": f"Bearer {keys[0].reveal()}"} if keys else {}
    connection = http.client.HTTPConnection(_reachable(settings.server.host), settings.server.port, timeout=ASK_TIMEOUT)
    try:
        connection.request("GET", "/workers", headers=headers)
        answer = connection.getresponse()
        workers = json.loads(answer.read())["workers"] if answer.status == 200 else []
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
    return len(workers) == count and all(worker["state"] == "up" for worker in workers)


def _reachable(host: str) -> str:
    return {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK}.get(host, host)


def serve(group: Group) -> int:
    """Run the group until it is told to stop or a part of it fails; the exit code."""
    from radixpd.runtime.child import name_process
    from radixpd.runtime.command_group import Command, CommandGroup
    from radixpd.runtime.logs import log_to_stderr
    from radixpd.runtime.peer_trust import VARIABLE
    from radixpd.runtime.private_folder import private_directory

    settings = group.settings
    log_to_stderr("launch_pd", settings.observe.log_level, settings.observe.log_format)
    name_process("radixpd-pd")
    with (
        ExitStack() as held,
        private_directory() as directory,
        CommandGroup(patience=settings.server.drain_timeout + STOP_GRACE) as running,
    ):
        shares = _shares(group)
        environment = _environment(settings, VARIABLE)
        commands, ports = [], {}
        for role, count in (("prefill", group.prefill), ("decode", group.decode)):
            ports[role] = [(next(each), next(each)) for each in (_free_ports(2, held) for _ in range(count))]
            for index, (port, bootstrap) in enumerate(ports[role]):
                events = f"{directory}/{role}-{index}"
                flags = server_flags(group, role, port=port, bootstrap_port=bootstrap, shares=shares, events=events)
                commands.append(Command(f"{role}-{index}", [sys.executable, "-m", "radixpd.launch_server", *flags], environment, wave=1))
        file = _write_private(Path(directory) / "lb.json", balancer_file(group, ports["prefill"], [port for port, _ in ports["decode"]]))
        balancer = [sys.executable, "-m", "radixpd.mini_lb", "--config", str(file), *group.lb_args]
        commands.insert(0, Command("lb", balancer, {name: value for name, value in os.environ.items() if name != VARIABLE}))
        running.start(commands, ready=lambda: _all_up(settings, group.servers), on_ready=lambda: _announce(group))
        return running.watch()


def _write_private(path: Path, content: Mapping[str, Any]) -> Path:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(content, file)
    return path


def _announce(group: Group) -> None:
    server = group.settings.server
    host = f"[{server.host}]" if ":" in server.host else server.host
    print(f"radixpd: ready on http://{host}:{server.port} ({group.prefill} prefill, {group.decode} decode)", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit code."""
    try:
        return serve(parse(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(f"radixpd: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
