// Ctrl-C in waits without the GIL. Called by the bindings that wait for reads.
#pragma once
#include <nanobind/nanobind.h>

namespace gids {

// Runs the handlers of signals that came; throws what they raised (KeyboardInterrupt).
inline void heed_signals() {
  nanobind::gil_scoped_acquire gil;
  if (PyErr_CheckSignals()) throw nanobind::python_error();
}

}  // namespace gids
