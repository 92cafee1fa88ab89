// CUDA C++ on the host, for tests: the part of the language that the kernels of native/**/*.cu use. Included
// before a kernel's source by tests/emulator.py; tests/emulator.cpp runs the threads. Knows no kernel.
//
// A CUDA thread is a fiber; the fibers of a block share one thread of the operating system, so that a static
// thread_local is the block's shared memory. A fiber runs until it meets others (a barrier, an intrinsic of the
// warp), sleeps, or, by chance, touches an atomic. A seed determines which fiber runs next.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <source_location>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __constant__ static const

struct uint2 { alignas(8) unsigned x; unsigned y; };
struct uint3 { unsigned x, y, z; };
struct uint4 { alignas(16) unsigned x; unsigned y, z, w; };
struct ulonglong2 { alignas(16) unsigned long long x; unsigned long long y; };
struct float2 { alignas(8) float x; float y; };
struct float4 { alignas(16) float x; float y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulated {

using Site = std::source_location;
using u32 = unsigned int;
using u64 = unsigned long long;

// What the lanes of a warp, or the threads of a block, meet for.
enum class Meeting : unsigned char { sync, shuffle, ballot, any, all, match, barrier, count, both, either };

// Until all lanes of mask have come with the same meeting, mask and site. source: the lane to hear from.
u64 meet_in_warp(Meeting meeting, u32 mask, u64 value, u32 source, const Site& site);
// Until all threads of the block have come; those that have returned are not waited for.
int meet_in_block(Meeting meeting, bool value, const Site& site);
// Lets others run; the operating system's too when asleep.
void yield(bool asleep);
// Before each atomic operation: yields now and then.
void before_atomic();
// Ends the launch with an error.
[[noreturn]] void fail(const char* what, const Site& site);

inline u32 lane() { return threadIdx.x % warpSize; }

template <class T> u64 to_bits(T value) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "what shuffles take");
  u64 bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T> T from_bits(u64 bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The lane `to`, or the caller's own where that is outside its group of `width` lanes.
template <class T> T shuffle(u32 mask, T value, bool inside, u32 to, const Site& site) {
  return from_bits<T>(meet_in_warp(Meeting::shuffle, mask, to_bits(value), inside ? to : lane(), site));
}

// Atomic words of one device.
template <class T> struct LocalRef : std::atomic_ref<T> {
  using Base = std::atomic_ref<T>;
  using Order = std::memory_order;
  using Base::Base;
  T load(Order order) const { return before_atomic(), Base::load(order); }
  void store(T value, Order order) const { before_atomic(), Base::store(value, order); }
  T exchange(T value, Order order) const { return before_atomic(), Base::exchange(value, order); }
  T fetch_add(T value, Order order) const { return before_atomic(), Base::fetch_add(value, order); }
  T fetch_sub(T value, Order order) const { return before_atomic(), Base::fetch_sub(value, order); }
  T fetch_and(T value, Order order) const { return before_atomic(), Base::fetch_and(value, order); }
  T fetch_or(T value, Order order) const { return before_atomic(), Base::fetch_or(value, order); }
  bool compare_exchange_weak(T& expected, T value, Order success, Order failure) const {
    return before_atomic(), Base::compare_exchange_weak(expected, value, success, failure);
  }
  bool compare_exchange_strong(T& expected, T value, Order success, Order failure) const {
    return before_atomic(), Base::compare_exchange_strong(expected, value, success, failure);
  }
};

// Words that cross the bus: nothing but loads and stores is atomic there.
template <class T> struct SystemRef : private LocalRef<T> {
  using LocalRef<T>::LocalRef;
  using LocalRef<T>::load;
  using LocalRef<T>::store;
};

// --- what tests/emulator.py is told of a kernel ---

struct Parameter {
  u32 bytes;
  char kind;    // 'p'ointer, 'i'nteger, 'f'loating point or 's'truct
  bool reads;   // a pointer to const
  u32 pointee;  // bytes of what a pointer points to; 0 for void
};
struct Kernel {
  const char* name;
  void (*call)(void** arguments);
  const Parameter* parameters;
  u32 parameter_count;
};

template <class T> constexpr Parameter describe() {
  using Pointee = std::remove_pointer_t<T>;
  u32 pointee = 0;
  if constexpr (std::is_pointer_v<T> && !std::is_void_v<Pointee>) pointee = sizeof(Pointee);
  const char kind = std::is_pointer_v<T>          ? 'p'
                    : std::is_integral_v<T>       ? 'i'
                    : std::is_floating_point_v<T> ? 'f'
                                                  : 's';
  return {sizeof(T), kind, std::is_const_v<Pointee>, pointee};
}

template <class... T> constexpr Parameter parameters[] = {describe<T>()..., {}};

template <auto kernel, class... T, std::size_t... i>
constexpr Kernel describe(const char* name, void (*)(T...), std::index_sequence<i...>) {
  const auto call = []([[maybe_unused]] void** arguments) { kernel(*static_cast<T*>(arguments[i])...); };
  return {name, call, parameters<T...>, sizeof...(T)};
}
template <auto kernel, class... T> constexpr Kernel describe(const char* name, void (*function)(T...)) {
  return describe<kernel>(name, function, std::index_sequence_for<T...>());
}

}  // namespace emulated

// --- the block ---

inline void __syncthreads(emulated::Site site = emulated::Site::current()) {
  emulated::meet_in_block(emulated::Meeting::barrier, false, site);
}
inline int __syncthreads_count(int value, emulated::Site site = emulated::Site::current()) {
  return emulated::meet_in_block(emulated::Meeting::count, value != 0, site);
}
inline int __syncthreads_and(int value, emulated::Site site = emulated::Site::current()) {
  return emulated::meet_in_block(emulated::Meeting::both, value != 0, site);
}
inline int __syncthreads_or(int value, emulated::Site site = emulated::Site::current()) {
  return emulated::meet_in_block(emulated::Meeting::either, value != 0, site);
}
inline void __threadfence_block() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned) { emulated::yield(true); }
inline void __trap(emulated::Site site = emulated::Site::current()) { emulated::fail("__trap()", site); }

// --- the warp ---

inline void __syncwarp(unsigned mask = ~0u, emulated::Site site = emulated::Site::current()) {
  emulated::meet_in_warp(emulated::Meeting::sync, mask, 0, 0, site);
}
inline unsigned __ballot_sync(unsigned mask, int value, emulated::Site site = emulated::Site::current()) {
  return static_cast<unsigned>(emulated::meet_in_warp(emulated::Meeting::ballot, mask, value != 0, 0, site));
}
inline int __any_sync(unsigned mask, int value, emulated::Site site = emulated::Site::current()) {
  return static_cast<int>(emulated::meet_in_warp(emulated::Meeting::any, mask, value != 0, 0, site));
}
inline int __all_sync(unsigned mask, int value, emulated::Site site = emulated::Site::current()) {
  return static_cast<int>(emulated::meet_in_warp(emulated::Meeting::all, mask, value != 0, 0, site));
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, emulated::Site site = emulated::Site::current()) {
  const auto bits = emulated::to_bits(value);
  return static_cast<unsigned>(emulated::meet_in_warp(emulated::Meeting::match, mask, bits, 0, site));
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize,
              emulated::Site site = emulated::Site::current()) {
  const unsigned group = emulated::lane() & ~static_cast<unsigned>(width - 1);
  return emulated::shuffle(mask, value, true, group | (static_cast<unsigned>(source) & (width - 1)), site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                 emulated::Site site = emulated::Site::current()) {
  const unsigned in_group = emulated::lane() & (width - 1);
  return emulated::shuffle(mask, value, delta <= in_group, emulated::lane() - delta, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                   emulated::Site site = emulated::Site::current()) {
  const unsigned in_group = emulated::lane() & (width - 1);
  return emulated::shuffle(mask, value, delta < width - in_group, emulated::lane() + delta, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize,
                  emulated::Site site = emulated::Site::current()) {
  const unsigned to = emulated::lane() ^ static_cast<unsigned>(bits);
  const unsigned group = emulated::lane() & ~static_cast<unsigned>(width - 1);
  return emulated::shuffle(mask, value, to < group + width, to, site);
}

// --- atomics: relaxed, as CUDA's ---

template <class T> T atomicAdd(T* at, std::type_identity_t<T> value) {
  return emulated::LocalRef<T>(*at).fetch_add(value, std::memory_order_relaxed);
}
template <class T> T atomicSub(T* at, std::type_identity_t<T> value) {
  return emulated::LocalRef<T>(*at).fetch_sub(value, std::memory_order_relaxed);
}
template <class T> T atomicAnd(T* at, std::type_identity_t<T> value) {
  return emulated::LocalRef<T>(*at).fetch_and(value, std::memory_order_relaxed);
}
template <class T> T atomicOr(T* at, std::type_identity_t<T> value) {
  return emulated::LocalRef<T>(*at).fetch_or(value, std::memory_order_relaxed);
}
template <class T> T atomicExch(T* at, std::type_identity_t<T> value) {
  return emulated::LocalRef<T>(*at).exchange(value, std::memory_order_relaxed);
}
template <class T> T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  const auto relaxed = std::memory_order_relaxed;
  emulated::LocalRef<T>(*at).compare_exchange_strong(expected, value, relaxed, relaxed);
  return expected;
}
template <class T> T atomicMin(T* at, std::type_identity_t<T> value) {
  const auto relaxed = std::memory_order_relaxed;
  emulated::LocalRef<T> word(*at);
  T now = word.load(relaxed);
  while (value < now && !word.compare_exchange_weak(now, value, relaxed, relaxed)) {}
  return now;
}
template <class T> T atomicMax(T* at, std::type_identity_t<T> value) {
  const auto relaxed = std::memory_order_relaxed;
  emulated::LocalRef<T> word(*at);
  T now = word.load(relaxed);
  while (now < value && !word.compare_exchange_weak(now, value, relaxed, relaxed)) {}
  return now;
}

// --- numbers ---

inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __popc(unsigned value) { return std::popcount(value); }
inline int __popcll(unsigned long long value) { return std::popcount(value); }
inline int __clz(int value) { return std::countl_zero(static_cast<unsigned>(value)); }
inline int __clzll(long long value) { return std::countl_zero(static_cast<unsigned long long>(value)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((std::uint64_t{a} * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
template <class T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T max(T a, T b) { return a < b ? b : a; }
