// Starts the threads of the native code: named, and without signals from outside. Called by the engines, the request
// queue's service and the cache's workers.
#pragma once

#include <csignal>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <pthread.h>

namespace gids::io {

// Runs `body` in a thread that takes no signals from outside: Python's handlers belong to the main thread. name: at
// most 15 characters. Throws std::system_error that names the limits when the system gives no thread.
template <class F>
std::thread start_thread(const std::string& name, F body) {
  struct SignalsBlocked {  // a thread inherits the mask of the one that starts it
    SignalsBlocked() {
      sigset_t all;
      sigfillset(&all);
      sigdelset(&all, SIGBUS);  // of a mapped file: see store/mapped_file.h
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  };
  try {
    const SignalsBlocked blocked;
    return std::thread([name, body = std::move(body)]() mutable {
      pthread_setname_np(pthread_self(), name.c_str());
      body();
    });
  } catch (const std::system_error& e) {
    throw std::system_error(e.code(), "cannot start the thread " + name +
                                          ": raise the limit on processes (ulimit -u, the container's pids limit) or "
                                          "on address space (ulimit -v), or ask for fewer threads");
  }
}

}  // namespace gids::io
