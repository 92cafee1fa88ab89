#include "io/request.h"

namespace gids::io {

u32 Request::scatter() {
  if (bounced) {
    iov[0] = {slot + position, bytes - position};
    return 1;
  }
  u32 n = 0;
  std::byte* bounce = slot;
  u64 begin = offset;  // reads of a scattered request follow each other without a gap
  for (u32 i = 0; i < count; ++i) {
    const Read& r = read(i);
    std::byte* dest = r.dest;
    if (!dest) {
      dest = bounce;
      bounce += r.bytes;
    }
    const u64 end = begin + r.bytes;
    const u64 from = offset + position;
    if (end > from) {
      const u64 skip = from > begin ? from - begin : 0;
      std::byte* base = dest + skip;
      const size_t length = r.bytes - skip;
      if (n && static_cast<std::byte*>(iov[n - 1].iov_base) + iov[n - 1].iov_len == base) {
        iov[n - 1].iov_len += length;
      } else {
        iov[n++] = {base, length};
      }
    }
    begin = end;
  }
  return n;
}

}  // namespace gids::io
