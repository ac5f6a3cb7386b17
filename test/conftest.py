"""Environment of every test, set before anything imports torch or transformers.

One compute thread (tests share the machine), no network look-ups, and a cache directory of the session's own, so that a test never reads
what an earlier run has left. `RADIXPD_TEST_CACHE=<dir>` keeps that directory between runs (the converted demo model lies there).
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

if kept := os.environ.get("RADIXPD_TEST_CACHE"):
    os.environ["XDG_CACHE_HOME"] = kept
else:
    cache = tempfile.mkdtemp(prefix="radixpd-test-")
    os.environ["XDG_CACHE_HOME"] = cache
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
