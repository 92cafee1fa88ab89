// Objects that a forked child must not end. Called by the bindings of what has threads or memory of its own.
#pragma once
#include <unistd.h>

#include <memory>
#include <utility>

namespace gids {

// Makes an object that is leaked in a forked child: its end would wait there for threads that do not exist, or unmap
// addresses that are now another's.
template <class T, class... Args>
std::shared_ptr<T> share_here(Args&&... args) {
  return {new T(std::forward<Args>(args)...), [pid = getpid()](T* object) {
            if (getpid() == pid) delete object;
          }};
}

}  // namespace gids
