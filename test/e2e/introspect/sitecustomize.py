"""Loaded by every Python process that has this folder on its PYTHONPATH: SIGUSR1 writes its `sys.modules` to `$MODULES_DIR/<pid>`.

So a test can look into the live processes of a server without any code in the server.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType


def _dump(number: int, frame: FrameType | None) -> None:
    path = Path(os.environ["MODULES_DIR"]) / str(os.getpid())
    path.with_suffix(".part").write_text("\n".join(sorted(sys.modules)))
    path.with_suffix(".part").rename(path)


signal.signal(signal.SIGUSR1, _dump)
