"""How much anonymous memory a process takes at most while something runs: what no file backs, so that it is held."""

import ctypes
import threading
from pathlib import Path
from types import TracebackType

STATUS = Path("/proc/self/status")
INTERVAL_S = 0.002


def anonymous_bytes() -> int:
    """RssAnon of this process now; 0 where the system does not say."""
    if not STATUS.is_file():
        return 0
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def give_back_free_memory() -> None:
    """Let the C library return what was freed, which would otherwise hide what is taken next."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class AnonymousPeak:
    """Watches RssAnon from a thread for as long as its block runs.

    Attributes:
      start: bytes when the block began.
      peak: the most bytes that were seen, at least `start`.
    """

    def __init__(self) -> None:
        self.start = self.peak = 0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "AnonymousPeak":
        give_back_free_memory()
        self.start = self.peak = anonymous_bytes()
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._watch.join()
        self.peak = max(self.peak, anonymous_bytes())

    @property
    def growth(self) -> int:
        """Bytes above the start."""
        return self.peak - self.start

    def _look(self) -> None:
        while not self._over.wait(INTERVAL_S):
            self.peak = max(self.peak, anonymous_bytes())
