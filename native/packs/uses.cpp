#include "packs/uses.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <unistd.h>

namespace gids::packs {
namespace {

[[noreturn]] void fail(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), std::string("rows of a superbatch: cannot ") + what);
}

}  // namespace

Uses::Uses(int fd, u64 row_count) : row_count_(row_count) {
  if (row_count >= u64{1} << 32) throw std::invalid_argument("rows are numbers of 4 bytes: the table has too many");
  fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (fd_ < 0) fail(errno, "duplicate the descriptor");
}

Uses::~Uses() { close(fd_); }

u64 Uses::longest() const {
  u64 most = 0;
  for (u32 step = 0; step < steps(); ++step) most = std::max(most, size(step));
  return most;
}

void Uses::append(std::span<const u32> rows) {
  if (steps() == note::most_steps)
    throw std::length_error("a superbatch has at most " + std::to_string(note::most_steps) + " minibatches");
  const auto highest = std::max_element(rows.begin(), rows.end());
  if (highest != rows.end() && *highest >= row_count_)
    throw std::out_of_range("row " + std::to_string(*highest) + " is outside a table of " +
                            std::to_string(row_count_) + " rows");
  write(rows.data(), rows.size_bytes(), first_.back() * use_bytes);
  first_.push_back(first_.back() + rows.size());
}

void Uses::read_rows(u32 step, u64 begin, std::span<u32> rows) const {
  read(rows.data(), rows.size_bytes(), at(step) + begin * sizeof(u32));
}

void Uses::write_lines(u32 step, u64 begin, std::span<const u32> lines) {
  write(lines.data(), lines.size_bytes(), at(step) + begin * sizeof(u32));
}

void Uses::read_notes(u32 step, u64 begin, std::span<u16> notes) const {
  read(notes.data(), notes.size_bytes(), run_at(step) + begin * sizeof(u16));
}

void Uses::read_copies(u32 step, u64 begin, std::span<u32> rows) const {
  read(rows.data(), rows.size_bytes(), copies_at(step) + begin * sizeof(u32));
}

void Uses::write_notes(u32 step, u64 begin, std::span<const u16> notes) {
  write(notes.data(), notes.size_bytes(), run_at(step) + begin * sizeof(u16));
}

void Uses::read(void* to, u64 bytes, u64 at) const {
  for (u64 done = 0; done < bytes;) {
    const ssize_t n = pread(fd_, static_cast<std::byte*>(to) + done, bytes - done, static_cast<off_t>(at + done));
    if (n > 0) done += static_cast<u64>(n);
    else if (n == 0) fail(ENODATA, "read them");  // somebody cut the file
    else if (errno != EINTR) fail(errno, "read them");
  }
}

void Uses::write(const void* from, u64 bytes, u64 at) {
  for (u64 done = 0; done < bytes;) {
    const ssize_t n =
        pwrite(fd_, static_cast<const std::byte*>(from) + done, bytes - done, static_cast<off_t>(at + done));
    if (n > 0) done += static_cast<u64>(n);
    else if (n == 0) fail(ENOSPC, "write them");
    else if (errno != EINTR) fail(errno, "write them");
  }
}

}  // namespace gids::packs
