// The noise of tokens for one instruction set, as noise.py has it: whole numbers, and floats of which one sum alone is
// rounded, so that the bits are the same everywhere. A register at a time.

#include "../cpu/vectors.h"
#include "sampling_cpu_types.h"

namespace {
namespace ISA {

#if WIDTH == 512
typedef UintVec UintPart;
#else
typedef uint32_t UintPart __attribute__((vector_size(WIDTH / 8), aligned(4), may_alias));
#endif

INLINE UintPart unsigned_of(IntPart x) { return reinterpret_cast<UintPart>(x); }
INLINE IntPart signed_of(UintPart x) { return reinterpret_cast<IntPart>(x); }
INLINE IntPart bits_of(Part x) { return reinterpret_cast<IntPart>(x); }
INLINE Part floats_of(IntPart x) { return reinterpret_cast<Part>(x); }
INLINE Part converted(IntPart x) { return __builtin_convertvector(x, Part); }

// The upper and the lower half of products of numbers without a sign.
struct Product {
  UintPart high, low;
};

INLINE Product product(UintPart a, uint32_t b) {
#if WIDTH == 512
  const auto x = reinterpret_cast<__m512i>(a), y = _mm512_set1_epi32(static_cast<int32_t>(b));
  const __m512i even = _mm512_mul_epu32(x, y), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), y);
  return {reinterpret_cast<UintPart>(_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd)),
          reinterpret_cast<UintPart>(_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32)))};
#elif WIDTH == 256
  const auto x = reinterpret_cast<__m256i>(a), y = _mm256_set1_epi32(static_cast<int32_t>(b));
  const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
  return {reinterpret_cast<UintPart>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa)),
          reinterpret_cast<UintPart>(_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa))};
#else
  UintPart high;
  for (int i = 0; i < kPartLanes; ++i) high[i] = static_cast<uint32_t>(uint64_t{a[i]} * b >> 32);
  return {high, a * b};
#endif
}

// The upper half of products of numbers with a sign.
INLINE IntPart high_product(IntPart a, IntPart b) {
#if WIDTH == 512
  const auto x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
  const __m512i even = _mm512_mul_epi32(x, y);
  const __m512i odd = _mm512_mul_epi32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(y, 32));
  return reinterpret_cast<IntPart>(_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd));
#elif WIDTH == 256
  const auto x = reinterpret_cast<__m256i>(a), y = reinterpret_cast<__m256i>(b);
  const __m256i even = _mm256_mul_epi32(x, y);
  const __m256i odd = _mm256_mul_epi32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(y, 32));
  return reinterpret_cast<IntPart>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa));
#else
  IntPart high;
  for (int i = 0; i < kPartLanes; ++i) high[i] = static_cast<int32_t>(int64_t{a[i]} * b[i] >> 32);
  return high;
#endif
}

struct Words {
  UintPart first, second;
};

// The first two words of Philox4x32-10 of the counters (position, each of `numbers`, kind, 0).
INLINE Words philox(const Choice& choice, UintPart numbers, uint32_t kind) {
  uint32_t key0 = static_cast<uint32_t>(choice.seed);
  uint32_t key1 = static_cast<uint32_t>(static_cast<uint64_t>(choice.seed) >> 32);
  UintPart c0 = UintPart{} + static_cast<uint32_t>(choice.position), c1 = numbers, c2 = UintPart{} + kind, c3 = {};
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const Product p0 = product(c0, 0xD2511F53u), p1 = product(c2, 0xCD9E8D57u);
    c0 = p1.high ^ c1 ^ key0;
    c1 = p1.low;
    c2 = p0.high ^ c3 ^ key1;
    c3 = p0.low;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {c0, c1};
}

// -log2(1 - y) / y in units of 2^-29, for y in units of 2^-31, 1 to 2^30.
INLINE IntPart log_quotient(IntPart y) {
  const IntPart z = 2 * y - (1 << 30);
  IntPart value = IntPart{} + 1116196858;
  value = 918918427 + high_product(value, z);
  value = 628879074 + high_product(value, z);
  value = 556261366 + high_product(value, z);
  value = 511902098 + high_product(value, z);
  value = 484234587 + high_product(value, z);
  value = 490959671 + high_product(value, z);
  value = 565739656 + high_product(value, z);
  return 891286246 + high_product(value, z);
}

INLINE Part exponential(UintPart word) {
  const IntPart v = signed_of((word >> 1) | 1u);
  const IntPart halvings = 157 - (bits_of(converted(v & ~(v >> 1))) >> 23);
  const IntPart rest = signed_of(0x80000000u - (unsigned_of(v) << unsigned_of(halvings)));
  const IntPart number = bits_of(converted(rest));
  const IntPart product = high_product(log_quotient(rest), ((number & 0x7fffff) | 0x800000) << 6);
  return converted(halvings) + converted(product) * floats_of(((number >> 23) - 57) << 23);
}

INLINE IntPart gumbel(Part exponential) {
  const IntPart number = bits_of(exponential), y = (0x800000 - (number & 0x7fffff)) << 7;
  return (high_product(log_quotient(y), y) >> 4) - (((number >> 23) - 126) << 24);
}

// Of 16 blocks: the least E, its place in the block, and the noise there.
struct BlockNoise {
  float least[kLanes];
  int32_t place[kLanes], noise[kLanes];
};

TARGET inline void block_noise(const Choice& choice, const uint32_t* blocks, BlockNoise& out) {
  for (int64_t i = 0; i < kLanes; i += kPartLanes) {
    const Words words = philox(choice, *reinterpret_cast<const UintPart*>(blocks + i), 0);
    const Part least = exponential(words.first) * (1.f / kBlock);
    store_part(out.least + i, least);
    *reinterpret_cast<IntPart*>(out.place + i) = signed_of(words.second & static_cast<uint32_t>(kBlock - 1));
    *reinterpret_cast<IntPart*>(out.noise + i) = gumbel(least);
  }
}

// The noise of 16 tokens that are not at the place of their block's least E, which is `least`.
TARGET inline void other_noise(const Choice& choice, const uint32_t* tokens, const float* least, int32_t* out) {
  for (int64_t i = 0; i < kLanes; i += kPartLanes) {
    const Words words = philox(choice, *reinterpret_cast<const UintPart*>(tokens + i), 1);
    *reinterpret_cast<IntPart*>(out + i) = gumbel(load_part(least + i) + exponential(words.first));
  }
}

}  // namespace ISA
}  // namespace
