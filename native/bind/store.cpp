#include "bind/bind.h"

namespace gids {
void bind_store(nanobind::module_&) {}
}  // namespace gids
