"""The real runner process around an engine without torch. `FAKE` names a way to misbehave."""

import os
import sys
import types

from fakes import FakeRunner

from radixpd.config.resolve import Resolved
from radixpd.core.step import StepPlan, StepResult
from radixpd.errors import ConfigError


class Runner(FakeRunner):
    def step(self, plan: StepPlan) -> StepResult:
        if os.environ.get("FAKE") == "break":
            raise MemoryError("/secret/path")
        return super().step(plan)

    def close(self) -> None:
        os.write(1, b"closed\n")


def build_runner(resolved: Resolved) -> Runner:
    if os.environ.get("FAKE") == "config":
        raise ConfigError("--dtype does not fit")
    if os.environ.get("FAKE") == "crash":
        raise OSError("/secret/path")
    return Runner(pages=resolved.pages, page_size=resolved.page_size, slots=resolved.max_running, context_length=resolved.context_length)


build = types.ModuleType("radixpd.engine.build")
build.build_runner = build_runner  # type: ignore[attr-defined]
sys.modules["radixpd.engine.build"] = build

if __name__ == "__main__":
    from radixpd.runtime import runner_process

    runner_process.main()
