// What module.cpp composes. Called by: module.cpp only.
#pragma once
#include <nanobind/nanobind.h>

namespace gids {
void bind_store(nanobind::module_& m);
void bind_row_order(nanobind::module_& m);
void bind_parts(nanobind::module_& m);
void bind_io(nanobind::module_& m);
void bind_queue(nanobind::module_& m);
void bind_cuda(nanobind::module_& m);
void bind_cache(nanobind::module_& m);
void bind_bench(nanobind::module_& m);
void bind_packs(nanobind::module_& m);
void bind_packs(nanobind::module_& m);
void bind_place(nanobind::module_& m);
void bind_sampler(nanobind::module_& m);
}  // namespace gids
