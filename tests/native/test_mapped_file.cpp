// sources: store/mapped_file.cpp cache/workers.cpp
// Threads read a file that ends early: those that read its end get MapFault, and nobody ever gets the zeros in its
// place.
#include "store/mapped_file.h"

#include <atomic>
#include <cerrno>
#include <fstream>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "cache/workers.h"
#include "check.h"

using namespace gids;

namespace {

constexpr u64 page = 4096, pages = 64, kept = 40;
constexpr unsigned char value = 7;

// What is in the first bytes of these pages, in this order.
std::vector<unsigned char> read(const store::MappedFile& file, const std::vector<u64>& wanted) {
  return store::read_mapped([&] {
    std::vector<unsigned char> values;
    for (const u64 p : wanted) values.push_back(static_cast<unsigned char>(file.data()[p * page]));
    return values;
  });
}

}  // namespace

int main(int, char** argv) {
  const std::string path = std::string(argv[1]) + "/mapped";
  std::ofstream(path) << std::string(pages * page, static_cast<char>(value));
  const int fd = open(path.c_str(), O_RDONLY);
  CHECK(fd >= 0);
  const store::MappedFile file(fd, pages * page, path), other(fd, 3 * page, "other");
  close(fd);
  CHECK(truncate(path.c_str(), kept * page) == 0);

  std::atomic<u64> faults{0}, whole{0};
  std::vector<std::thread> threads;
  for (u64 t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (u64 i = 0; i < 300; ++i) {
        const bool beyond = (i + t) % 3 == 0;
        const u64 last = beyond ? kept + (i * 7 + t) % (pages - kept) : (i * 5 + t) % kept;
        try {
          for (const unsigned char v : read(file, {i % kept, (i * 3) % kept, last})) CHECK(v == value);
          CHECK(!beyond);
          ++whole;
        } catch (const store::MapFault& fault) {
          // With three other threads that meet faults, a read is given up after some tries.
          if (beyond) CHECK(fault.error == ENODATA && fault.path == path && fault.offset >= kept * page);
          ++faults;
        }
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(faults >= 4 * 100 && whole > 0);

  // The threads of Workers read under the guard of the caller.
  cache::Workers workers(3);
  for (int round = 0; round < 20; ++round) {
    std::atomic<u64> sum{0};
    try {
      store::read_mapped([&] {
        sum = 0;
        workers.parallel_for(pages, 1, [&](size_t begin, size_t end, u32) {
          for (size_t p = begin; p < end; ++p) sum += static_cast<u64>(file.data()[p * page]);
        });
        return 0;
      });
      CHECK(false);
    } catch (const store::MapFault& fault) {
      CHECK(fault.error == ENODATA);
    }
  }
  CHECK((read(file, {0, kept - 1}) == std::vector<unsigned char>(2, value)));
  CHECK((read(other, {0, 2}) == std::vector<unsigned char>(2, value)));
  CHECK(!store::value_at(reinterpret_cast<const u32*>(file.data() + kept * page)));
  CHECK(store::value_at(reinterpret_cast<const u32*>(file.data())) == 0x07070707u);
}
