"""`python -m radixpd.launch_server --model-path M`: arguments -> settings -> supervisor, and nothing else.

The one place that knows which module is which process. Exit code 0 after a clean drain, 2 when the settings, the machine or the model
do not fit (one line on standard error), another when a process failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from radixpd.config import cli
from radixpd.errors import ConfigError

__all__ = ["ENTRIES", "main"]

ENTRIES = {
    "model_files": "radixpd.runtime.model_files",
    "api": "radixpd.server.process",
    "scheduler": "radixpd.runtime.scheduler_process",
    "runner": "radixpd.runtime.runner_process",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit code."""
    try:
        settings = cli.parse(sys.argv[1:] if argv is None else argv)
        # After parsing: `--help` and a misspelt flag answer without loading the runtime.
        from radixpd.runtime.supervisor import serve

        return serve(settings, entries=ENTRIES)
    except ConfigError as error:
        print(f"radixpd: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
