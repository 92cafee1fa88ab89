// Calls that read mapped files. A page that cannot be read becomes gids.errors.StorageError, by the translator in
// store.cpp.
#pragma once
#include "store/mapped_file.h"

namespace gids {

// f() is called once: for work that cannot be repeated. Else see store::read_mapped.
template <class F>
auto guarded(const F& f) {
  store::MapGuard::prepare();
  const store::MapGuard guard;
  auto result = f();
  guard.check();
  return result;
}

}  // namespace gids
