"""The parent process: takes the port, prepares the model, decides every setting, starts the children and watches them.

Order matters: the port is bound and listening before weights load, everything that can be refused is refused before a child starts, and
every path out removes the private directory and leaves no child. Called by `launch_server` and `llm` with the children's module names, so
that nothing here imports upward.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import logging
import os
import secrets
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

from radixpd.config.resolve import Resolved, read_machine_facts, read_model_facts, resolve, to_json
from radixpd.config.settings import ObserveSettings, Settings
from radixpd.errors import ConfigError
from radixpd.kv.codec_choice import carriers
from radixpd.models.spec import ModelSpec
from radixpd.runtime.child import Launch, name_process
from radixpd.runtime.defaults import defaults_of
from radixpd.runtime.logs import log_to_stderr
from radixpd.runtime.model_files import prepare_in_child
from radixpd.runtime.peer_trust import load_secret
from radixpd.runtime.private_folder import private_directory
from radixpd.runtime.process_group import API, ProcessGroup
from radixpd.runtime.watchdog import Watchdog

__all__ = ["bind", "decide", "serve", "start", "start_engine"]

BACKLOG = 1024

logger = logging.getLogger(__name__)


def serve(settings: Settings, *, entries: dict[str, str]) -> int:
    """Run a server until it is told to stop or fails; returns the exit code.

    `entries`: module names of api, scheduler and runner. What does not fit is a `ConfigError` before any of them starts.
    """
    began = time.monotonic()
    observe = settings.observe
    log_to_stderr("supervisor", observe.log_level, observe.log_format)
    name_process("radixpd")
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    watchdog = Watchdog(settings.server.watchdog_timeout, observe.soft_watchdog_timeout)
    try:
        with bind(settings.server.host, settings.server.port) as listener:
            _prepare_folders(observe)
            # The port that was found is part of this server's name among its peers.
            resolved = decide(replace(settings, server=replace(settings.server, port=listener.getsockname()[1])))
            for note in resolved.notes:
                logger.info("%s", note)
            with (
                private_directory() as directory,
                ProcessGroup(drain_timeout=settings.server.drain_timeout, watchdog=watchdog) as group,
            ):
                start(group, entries, resolved=to_json(resolved), directory=directory, listener=listener, settings=settings, began=began)
                return group.watch()
    except KeyboardInterrupt:
        # Only before the group exists, when there is nothing to drain.
        return 128 + signal.SIGINT


def _prepare_folders(observe: ObserveSettings) -> None:
    """The folders that something may have to be written into in a bad moment exist and can be written to."""
    for flag, folder in (("--crash-dump-folder", observe.crash_dump_folder), ("--profile-folder", observe.profile_folder)):
        if folder is None:
            continue
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{flag} {folder}: {error.strerror}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{flag} {folder}: this user cannot write there")


def start(
    group: ProcessGroup,
    entries: dict[str, str],
    *,
    resolved: str,
    directory: str,
    listener: socket.socket,
    settings: Settings,
    began: float,
) -> None:
    """Start the children of one server. `began`: when the command did."""
    observe = settings.observe
    launch = Launch(
        resolved=resolved, directory=directory, parent=0, log_level=observe.log_level, log_format=observe.log_format, began=began
    )
    start_engine(group, entries, launch)
    fd = listener.fileno()
    group.spawn(API, entries["api"], replace(launch, listen_fd=fd), pass_fds=(fd,))
    # The API's copy is the only one, so that clients see the port close when it goes.
    listener.close()


def start_engine(group: ProcessGroup, entries: dict[str, str], launch: Launch, *, pass_fds: tuple[int, ...] = ()) -> None:
    """Start what computes. The runner comes first: it takes longest."""
    for name in ("runner", "scheduler"):
        group.spawn(name, entries[name], launch, pass_fds=pass_fds)


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. It listens at once: on Linux a port that is only bound can still be taken by another server."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use: stop what listens there or choose another with --port") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"--host {host} is not an address of this machine") from None
        raise ConfigError(f"cannot listen on port {port} of {host} (--port, --host): {error.strerror}") from None
    return listener


def _check_model(directory: Path, given: str) -> None:
    """Refuse a model that the runner cannot compute, before any process starts."""
    try:
        ModelSpec.from_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except ConfigError as error:
        raise ConfigError(f"--model-path {given}: {error}") from None


def decide(settings: Settings) -> Resolved:
    """Look at the model and the machine, and replace every "decide for me" of the settings."""
    peers = settings.disaggregation
    carriers(peers.disaggregation_transfer_backend, peers.disaggregation_transfer_dtype)  # refuses what does not go together
    files = prepare_in_child(settings.model)
    _check_model(Path(files.directory), settings.model.model_path)
    secret = load_secret(settings.disaggregation.disaggregation_secret_file or "", os.environ)
    resolved = resolve(
        settings,
        directory=files.directory,
        tokenizer_directory=files.tokenizer_directory,
        model=read_model_facts(files.directory),
        machine=read_machine_facts(),
        seed=secrets.randbits(62),
    )
    defaults_of(resolved)  # refuses what no request could ask for
    return replace(resolved, peer_secret=secret)
