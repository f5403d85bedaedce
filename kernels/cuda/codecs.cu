// Int8 with a scale a group, and one bit an element: how a slice is stored while it is away. See `cpu/int8.rs` for why the bound of
// half a step holds exactly; every operation here rounds as it does there, so the codes are the same.

#include "common.cuh"

// A scale whose products with codes are exact: 16 bits of significand.
__device__ __forceinline__ float scale_of(float largest) {
    float scale = __fdiv_rn(largest, 127.f);
    if (scale >= __int_as_float(0x00800000)) return __uint_as_float(__float_as_uint(scale) & ~0xffu);
    if (largest == 0.f) return 0.f;
    scale = __int_as_float(1);
    while (__fmul_rn(127.f, scale) < largest) scale = __fmul_rn(scale, 2.f);
    return scale;
}

// Adding it rounds to an integer, which is then in the low bits.
#define ROUND 12582912.f

__device__ __forceinline__ u32 nearest_code(float x, float divisor, float inverse) {
    // Of a step so small that its inverse is too large, the quotient itself.
    float quotient = is_finite(inverse) ? __fmul_rn(x, inverse) : __fdiv_rn(x, divisor);
    float shifted = __fadd_rn(quotient, ROUND), nearest = __fadd_rn(shifted, -ROUND);
    float rest = __fadd_rn(x, -__fmul_rn(nearest, divisor)), half = __fmul_rn(0.5f, divisor);
    u32 code = __float_as_uint(shifted) + (rest > half) - (rest < -half);
    return is_finite(x) ? code & 0xff : 0x80;
}

__device__ __forceinline__ u32 stochastic_code(float x, float divisor, u32 word) {
    float fraction = (float)(word >> 8) * (1.f / 16777216.f), quotient = __fdiv_rn(x, divisor), below = floorf(quotient);
    float chosen = __fadd_rn(quotient, -below) > fraction ? below + 1.f : below;
    if (chosen > 127.f) chosen = 127.f;
    if (chosen < -127.f) chosen = -127.f;
    u32 code = __float_as_uint(__fadd_rn(chosen, ROUND)) - __float_as_uint(ROUND);
    return is_finite(x) ? code & 0xff : 0x80;
}

// A warp a group; every lane has N elements of it at a time, of at most 256 in all.
template <int N, bool STOCHASTIC>
__device__ __forceinline__ void encode(Floats input, u8* out, u64 count, u32 group, u64 seed, u32 site, u32 step) {
    u64 groups = (count + group - 1) / group;
    u8* codes = out + 4 * groups;
    int lane = threadIdx.x & 31;
    for (u64 index = blockIdx.x * (u64)(blockDim.x / 32) + threadIdx.x / 32; index < groups; index += (u64)gridDim.x * (blockDim.x / 32)) {
        u64 first = index * group, end = first + group < count ? first + group : count;
        float largest = 0.f;
        for (u64 at = first + N * lane; at < end; at += 32 * N) {
            float x[N];
            load<N>(input, at, x);
#pragma unroll
            for (int i = 0; i < N; i++) largest = larger(largest, is_finite(x[i]) ? fabsf(x[i]) : 0.f);
        }
        float scale = scale_of(warp_max(largest)), divisor = scale == 0.f ? 1.f : scale, inverse = __fdiv_rn(1.f, divisor);
        if (lane == 0) {
            u32 bits = __float_as_uint(scale);
            // The slice may begin at any byte.
            for (int i = 0; i < 4; i++) out[4 * index + i] = (u8)(bits >> 8 * i);
        }
        for (u64 at = first + N * lane; at < end; at += 32 * N) {
            float x[N];
            u32 code[N];
            load<N>(input, at, x);
            uint4 words[2];
            if (STOCHASTIC) words[0] = philox(at / 4, site, step, seed);
            if (STOCHASTIC && N == 8) words[1] = philox(at / 4 + 1, site, step, seed);
#pragma unroll
            for (int i = 0; i < N; i++) {
                u32 place = N == 1 ? (u32)at % 4 : i % 4;
                uint4 four = words[i / 4];
                u32 word = place == 0 ? four.x : place == 1 ? four.y : place == 2 ? four.z : four.w;
                code[i] = STOCHASTIC ? stochastic_code(x[i], divisor, word) : nearest_code(x[i], divisor, inverse);
            }
            if (N == 8) {
                u32 low = code[0] | code[1 % N] << 8 | code[2 % N] << 16 | code[3 % N] << 24;
                u32 high = code[4 % N] | code[5 % N] << 8 | code[6 % N] << 16 | code[7 % N] << 24;
                *(uint2*)(codes + at) = make_uint2(low, high);
            } else {
                codes[at] = (u8)code[0];
            }
        }
    }
}

struct Int8Encode {
    Floats input;
    u8* out;
    u64 count;
    u32 group;

    template <int N> __device__ __forceinline__ void run() const {
        encode<N, false>(input, out, count, group, 0, 0, 0);
    }
};
WIDTHS(int8_encode, Int8Encode)

struct Int8EncodeStochastic {
    Floats input;
    u8* out;
    u64 count;
    u32 group;
    u64 seed;
    u32 site, step;

    template <int N> __device__ __forceinline__ void run() const {
        encode<N, true>(input, out, count, group, seed, site, step);
    }
};
WIDTHS(int8_encode_stochastic, Int8EncodeStochastic)

struct Int8Decode {
    const u8* input;
    Floats out;
    u64 count;
    u32 group;

    template <int N> __device__ __forceinline__ void run() const {
        const u8* codes = input + 4 * ((count + group - 1) / group);
        u64 stride = N * (u64)gridDim.x * blockDim.x;
        for (u64 at = N * (blockIdx.x * (u64)blockDim.x + threadIdx.x); at < count; at += stride) {
            const u8* of_group = input + 4 * (at / group);
            float x[N];
            float scale;
            u32 code[2];
            if (N == 8) {
                scale = *(const float*)of_group;
                uint2 eight = *(const uint2*)(codes + at);
                code[0] = eight.x;
                code[1] = eight.y;
            } else {
                scale = __uint_as_float(of_group[0] | of_group[1] << 8 | of_group[2] << 16 | (u32)of_group[3] << 24);
                code[0] = codes[at];
            }
            for (int i = 0; i < N; i++) {
                i8 one = (i8)(code[i / 4] >> 8 * (i % 4));
                x[i] = one == -128 ? not_a_number() : __fmul_rn((float)one, scale);
            }
            store<N>(out, at, x);
        }
    }
};
WIDTHS(int8_decode, Int8Decode)

// Eight elements a byte: a thread a byte.
struct BitsEncode {
    const u8* input;
    u8* out;
    u64 count;

    __device__ __forceinline__ void run() const {
        u64 stride = (u64)gridDim.x * blockDim.x;
        for (u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x; 8 * at < count; at += stride) {
            u32 byte = 0;
            for (int i = 0; i < 8 && 8 * at + i < count; i++) byte |= (u32)(input[8 * at + i] != 0) << i;
            out[at] = (u8)byte;
        }
    }
};
KERNEL(bits_encode, BitsEncode)

struct BitsDecode {
    const u8* input;
    u8* out;
    u64 count;

    __device__ __forceinline__ void run() const {
        u64 stride = (u64)gridDim.x * blockDim.x;
        for (u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x; at < count; at += stride) out[at] = input[at / 8] >> at % 8 & 1;
    }
};
KERNEL(bits_decode, BitsDecode)
