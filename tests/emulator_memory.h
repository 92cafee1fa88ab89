// Device memory of the emulator: each tensor between pages without access, so that what goes beyond it faults.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace emulated {

constexpr int kPoison = 0xa5;  // what memory holds that nobody wrote
constexpr std::size_t kMemoryPage = 4096;
constexpr std::size_t kAlignment = 16;  // of the end's slack

struct Allocation {
  std::byte* mapping;
  std::size_t mapping_bytes, bytes;
};

inline std::mutex g_memory_mutex;
inline std::map<std::byte*, Allocation> g_memory;  // by the first byte

inline std::size_t slack(const Allocation& a) { return (kAlignment - a.bytes % kAlignment) % kAlignment; }

// Memory whose first byte after the end may not be touched; 16-byte aligned. Zeroed, or poisoned.
inline void* allocate(std::size_t bytes, bool zeroed) {
  const std::size_t used = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const std::size_t inner = (used + kMemoryPage - 1) / kMemoryPage * kMemoryPage;
  const std::size_t outer = inner + 2 * kMemoryPage;
  void* m = mmap(nullptr, outer, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return nullptr;
  std::byte* const mapping = static_cast<std::byte*>(m);
  if (mprotect(mapping + kMemoryPage, inner, PROT_READ | PROT_WRITE)) {
    munmap(mapping, outer);
    return nullptr;
  }
  std::byte* const start = mapping + kMemoryPage + inner - used;
  if (!zeroed) std::memset(start, kPoison, bytes);
  std::memset(start + bytes, kPoison, used - bytes);
  std::lock_guard lock(g_memory_mutex);
  g_memory[start] = {mapping, outer, bytes};
  return start;
}

inline void release(void* start) {
  std::lock_guard lock(g_memory_mutex);
  const auto found = g_memory.find(static_cast<std::byte*>(start));
  munmap(found->second.mapping, found->second.mapping_bytes);
  g_memory.erase(found);
}

// What lies at an address that must not be touched.
inline std::string describe_address(const void* address) {
  char text[120];
  std::snprintf(text, sizeof text, "%p", address);
  std::lock_guard lock(g_memory_mutex);
  for (const auto& [start, a] : g_memory) {
    const auto at = static_cast<const std::byte*>(address);
    if (at < a.mapping || at >= a.mapping + a.mapping_bytes) continue;
    if (at < start)
      std::snprintf(text, sizeof text, "%td bytes before a tensor of %zu bytes", start - at, a.bytes);
    else
      std::snprintf(text, sizeof text, "byte %td of a tensor of %zu bytes", at - start, a.bytes);
  }
  return text;
}

// The slack behind tensors is as it was? Then "".
inline std::string find_damage() {
  std::lock_guard lock(g_memory_mutex);
  for (const auto& [start, a] : g_memory) {
    std::byte* const end = start + a.bytes;
    for (std::size_t i = 0; i < slack(a); ++i) {
      if (end[i] == std::byte{kPoison}) continue;
      std::memset(end, kPoison, slack(a));
      return "wrote byte " + std::to_string(a.bytes + i) + " of a tensor of " + std::to_string(a.bytes) + " bytes";
    }
  }
  return "";
}

}  // namespace emulated
