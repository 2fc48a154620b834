// Packs rows of a weight matrix into the layout of packed_linear.py. Plain loops: a load of a model reads and packs a
// piece while it is in the caches, on threads of its own.

#include "pack_words.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void pack_words32(const uint32_t* from, int64_t rows, int64_t words, int64_t first, uint32_t* to) {
  pack(from, rows, words, first, to);
}

EXPORT void pack_words16(const uint16_t* from, int64_t rows, int64_t words, int64_t first, uint16_t* to) {
  pack(from, rows, words, first, to);
}
