"""A model runner process: it owns the tensors of one rank and runs plans in order.

Invariant: one answer per plan, in the order of the plans; it decides nothing. Torch is imported only after `child.begin`, so that the
process is tied to its parent from its first moment. Started by the supervisor as `python -m radixpd.runtime.runner_process`.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import zmq

from radixpd.config.resolve import Resolved, from_json
from radixpd.errors import BadRequest, ConfigError
from radixpd.runtime import child
from radixpd.runtime.disaggregation import has_peers
from radixpd.runtime.links import Addresses, Receiver, Sender
from radixpd.runtime.messages import Control, Failed, Forget, Made, Reply, RunnerReady, Shutdown, Step, Stepped, ToRunner, Want
from radixpd.runtime.orders import ORDERS, obey
from radixpd.runtime.watchdog import BEAT, Pulse

if TYPE_CHECKING:
    from radixpd.engine.profile import Profiler
    from radixpd.engine.runner import Runner
    from radixpd.grammar.library import Library
    from radixpd.runtime.mover_link import MoverLink

__all__ = ["main"]

LINGER_MS = 1000
SPINS = "5000"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What one runner process holds."""

    runner: Runner
    link: MoverLink | None
    library: Library | None


def _load(launch: child.Launch, context: zmq.Context[Any], addresses: Addresses) -> tuple[_Parts, RunnerReady]:
    # A core that another process has taken must not cost a whole time slice at every barrier: wait briefly, then sleep. Read by the
    # OpenMP runtime when torch loads it.
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from radixpd.engine.build import build_runner
    from radixpd.kv.layout import KVLayout

    began = time.monotonic()
    resolved = from_json(launch.resolved)
    runner = build_runner(resolved)
    link = _mover_link(launch, resolved, runner, context, addresses)
    layout = KVLayout(**resolved.layout)
    return (
        _Parts(runner, link, _library(resolved, runner)),
        RunnerReady(
            resolved.pages,
            resolved.page_size,
            runner.fingerprint,
            time.monotonic() - began,
            layout={**asdict(layout), "fingerprint": layout.fingerprint},
            endpoints=link.endpoints if link else {},
        ),
    )


def _mover_link(
    launch: child.Launch, resolved: Resolved, runner: Runner, context: zmq.Context[Any], addresses: Addresses
) -> MoverLink | None:
    """The mover of a server that has peers."""
    if not has_peers(resolved):
        return None
    from radixpd.engine.layerwise import Late
    from radixpd.runtime.mover_link import MoverLink, mover_options

    link = MoverLink(context, addresses, launch.rank, runner.pool, mover_options(resolved, launch.directory))
    late = resolved.settings.disaggregation.disaggregation_disable_overlap
    runner.departures = Late(link.mover, layers=runner.pool.layout.layers) if late else link.mover
    return link


def _library(resolved: Resolved, runner: Runner) -> Library | None:
    """The grammars of a server that has any. Nothing is loaded before the first."""
    settings = resolved.settings.engine
    if settings.grammar_backend == "none" or not resolved.eos_ids:
        return None
    from radixpd.engine.constraints import Constraints
    from radixpd.grammar.library import CompileLimits, Library
    from radixpd.runtime.vocabulary import Spelling

    spelling = Spelling(resolved)
    library = Library(
        settings.grammar_backend, spelling.vocabulary, spelling.canonical, CompileLimits(seconds=settings.grammar_compile_timeout)
    )
    runner.constraints = Constraints(
        vocab_size=resolved.model.vocab_size, open_guide=library.guide, jump=not resolved.settings.scheduler.disable_jump_forward
    )
    return library


class _Orders:
    """What the runner does between steps beside computing."""

    def __init__(self, launch: child.Launch) -> None:
        self._launch = launch
        self._profiler: Profiler | None = None  # from the first order on that is about a profile

    def answer(self, order: Control) -> Reply:
        """Carry it out; what cannot be done is told in the reply."""
        try:
            if order.action in ORDERS:
                return Reply(order.id, obey(order.action, order.args))
            if order.action == "start_profile":
                self._profiles().start(**order.args)
                return Reply(order.id, {})
            if order.action == "stop_profile":
                return Reply(order.id, {"path": self._profiles().stop()})
        except BadRequest as error:
            return Reply(order.id, {}, str(error))
        return Reply(order.id, {}, f"unknown action {order.action}")

    def stepped(self) -> None:
        """A step has run."""
        if self._profiler is not None:
            self._profiler.stepped()

    def _profiles(self) -> Profiler:
        from radixpd.engine.profile import Profiler

        if self._profiler is None:
            self._profiler = Profiler(from_json(self._launch.resolved).settings.observe.profile_folder, rank=self._launch.rank)
        return self._profiler


def _run_steps(parts: _Parts, plans: Receiver[ToRunner], results: Sender, orders: _Orders, pulse: Pulse) -> int:
    """Run plans until `Shutdown`, or until the parent is gone; the exit code."""
    runner, link, library = parts.runner, parts.link, parts.library
    poller = zmq.Poller()
    poller.register(plans.socket, zmq.POLLIN)
    poller.register(child.CONTROL_FD, zmq.POLLIN)
    if library is not None:
        poller.register(library.fd, zmq.POLLIN)
    while True:
        pulse.beat()
        if any(socket == child.CONTROL_FD for socket, _ in poller.poll(int(BEAT * 1000))) and child.parent_is_gone():
            return child.EXIT_FAILED
        for made in library.take() if library is not None else ():
            results.send(Made(made.id, made.error, made.status))
        for message in plans.drain():
            match message:
                case Step(plan, ended):
                    began = time.perf_counter()
                    if link is not None:
                        link.mover.void(ended)
                    result = runner.step(plan)
                    results.send(Stepped(replace(result, seconds=result.seconds or time.perf_counter() - began)))
                    orders.stepped()
                    pulse.beat()
                case Want(id, grammar):
                    if library is not None:
                        library.want(id, grammar)
                    else:
                        results.send(Made(id, "this model names no end of sequence, which a grammar needs"))
                case Forget(grammar):
                    if library is not None:
                        library.forget(grammar)
                case Control():
                    results.send(orders.answer(message))
                case Shutdown():
                    return 0


def _body(launch: child.Launch) -> int:
    context: zmq.Context[Any] = zmq.Context()
    addresses = Addresses(launch.directory)
    results = Sender(context, addresses.from_runner)
    plans: Receiver[ToRunner] = Receiver(context, addresses.to_runner(launch.rank), ToRunner, bind=True)
    try:
        parts, ready = _load(launch, context, addresses)
        results.send(ready)
        # The mover lets go of the pool before the pool goes.
        with (
            closing(parts.runner),
            closing(parts.link) if parts.link else nullcontext(),
            closing(parts.library) if parts.library else nullcontext(),
        ):
            return _run_steps(parts, plans, results, _Orders(launch), Pulse(launch.watch_fd))
    except ConfigError:
        raise
    except Exception as error:
        # Clients read this message: the kind of error only, the trace is for the log.
        logger.exception("model runner %d failed", launch.rank)
        results.send(Failed(f"the model runner failed ({type(error).__name__})"))
        return child.EXIT_FAILED
    finally:
        context.destroy(linger=LINGER_MS)


def main() -> None:
    """Entry point of the process."""
    child.run("runner", _body)


if __name__ == "__main__":
    main()
