// The Python extension gids._core. Each noun binds itself in a file of its own; nothing else in
// native/ includes nanobind.
#include <nanobind/nanobind.h>

#include "bind/bind.h"

NB_MODULE(_core, m) {
  // Python frees no global of a script that a log handler or a daemon thread refers to: users cannot mend that.
  nanobind::set_leak_warnings(false);
  m.doc() = "Native half of gids: I/O engines, cache, checksums.";
  gids::bind_store(m);
  gids::bind_row_order(m);
  gids::bind_parts(m);
  gids::bind_io(m);
  gids::bind_queue(m);
  gids::bind_cuda(m);
  gids::bind_cache(m);
  gids::bind_bench(m);
  gids::bind_packs(m);
  gids::bind_place(m);
  gids::bind_sampler(m);
}
