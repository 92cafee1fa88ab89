"""Record which pages a training run reads, and replay the trace in a cache of any size."""

from gids.trace.recording import Trace, record

__all__ = ["Trace", "record"]
