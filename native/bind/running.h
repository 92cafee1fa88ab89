// Native objects that work in threads of their own. Called by the bindings of sweeps and reads.
#pragma once
#include <unistd.h>

#include <memory>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "bind/fork.h"
#include "bind/signals.h"

namespace gids {

namespace nb = nanobind;

// Waits with the GIL released, and lets Ctrl-C through.
template <class T>
void wait(T& work) {
  nb::gil_scoped_release release;
  while (!work.wait_for(100)) heed_signals();
}

// A native object that ends with the GIL released, and before the memory that its threads use.
template <class T>
class Running {
 public:
  template <class... Args>
  explicit Running(std::vector<nb::object> kept, Args&&... args) : kept_(std::move(kept)) {
    nb::gil_scoped_release release;
    work_ = std::make_unique<T>(std::forward<Args>(args)...);
  }
  ~Running() {
    if (getpid() != pid_) {  // see share_here
      (void)work_.release();
      return;
    }
    nb::gil_scoped_release release;
    work_.reset();
  }
  T* operator->() const { return work_.get(); }
  T& operator*() const { return *work_; }

 private:
  const pid_t pid_ = getpid();
  std::vector<nb::object> kept_;
  std::unique_ptr<T> work_;
};

}  // namespace gids
