// Fibers of the emulator: a stack and what the processor holds while another runs. Knows nothing of threads of a
// kernel.
#pragma once

#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <new>
#include <vector>

namespace emulated {

constexpr unsigned kThreadsMax = 1024;
constexpr std::size_t kStackBytes = 64 << 10;
constexpr std::size_t kGuardBytes = 4096;  // below each stack, without access

#if defined(__x86_64__)
extern "C" void emulated_switch(void** from, void* to);
asm(R"(
.text
.globl emulated_switch
.hidden emulated_switch
.type emulated_switch, @function
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulated_switch, . - emulated_switch
)");

struct Context {
  void* top = nullptr;

  void prepare(std::byte* stack, void (*entry)()) {
    void** at = reinterpret_cast<void**>(stack + kStackBytes) - 2;  // as after a call: 8 below a multiple of 16
    at[0] = reinterpret_cast<void*>(entry);
    at[1] = nullptr;
    std::fill(at - 6, at, nullptr);
    top = at - 6;
  }
  static void change(Context& from, Context& to) { emulated_switch(&from.top, to.top); }
};
#else
struct Context {
  ucontext_t registers;

  void prepare(std::byte* stack, void (*entry)()) {
    getcontext(&registers);
    registers.uc_stack.ss_sp = stack;
    registers.uc_stack.ss_size = kStackBytes;
    registers.uc_link = nullptr;
    makecontext(&registers, entry, 0);
  }
  static void change(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }
};
#endif

// Stacks of one block, kept for the next launch.
class Stacks {
 public:
  Stacks() {
    void* m = mmap(nullptr, kThreadsMax * kStep, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (m == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<std::byte*>(m);
    for (unsigned i = 0; i < kThreadsMax; ++i) mprotect(memory_ + i * kStep, kGuardBytes, PROT_NONE);
  }
  std::byte* stack(unsigned i) const { return memory_ + i * kStep + kGuardBytes; }

 private:
  static constexpr std::size_t kStep = kStackBytes + kGuardBytes;
  std::byte* memory_;
};

inline std::mutex g_stacks_mutex;
inline std::vector<Stacks> g_stacks;  // not in use

inline Stacks take_stacks() {
  std::lock_guard lock(g_stacks_mutex);
  if (g_stacks.empty()) return Stacks();
  Stacks stacks = g_stacks.back();
  g_stacks.pop_back();
  return stacks;
}
inline void give_stacks(const Stacks& stacks) {
  std::lock_guard lock(g_stacks_mutex);
  g_stacks.push_back(stacks);
}

}  // namespace emulated
