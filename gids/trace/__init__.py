"""Record which pages a training run reads, and replay the trace in a cache of any size."""

from gids.trace.recording import record
from gids.trace.trace_file import Trace

__all__ = ["Trace", "record"]
