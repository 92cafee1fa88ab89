// see crc32c.h
