// What every kernel here shares: floats of any type, reductions, the dropout generator. No headers, so that NVRTC alone is enough.
//
// Kernels take any mix of f32, f16 and bf16, compute in f32 and round once where they store, as the CPU's do. The type of an
// operand is an argument: a branch that all lanes take alike, in kernels that wait for memory anyway.
//
// Kernels come as NAME_8, eight elements a thread and access (16 bytes in 16 bits), and NAME_1, one, for operands that are not
// aligned for that. Both give the same bits.

#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum : u32 { F32, F16, BF16 };

// Elements of a type known at run time.
struct Floats {
    void* data;
    u32 dtype, unused;
};

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }
__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < infinity(); }

__device__ __forceinline__ float from_f16(u32 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)x));
    return y;
}
__device__ __forceinline__ u32 to_f16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float from_bf16(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ u32 to_bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
// Two at once; the first in the low half.
__device__ __forceinline__ u32 to_16_bits(u32 dtype, float low, float high) {
    u32 y;
    if (dtype == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ float from_16_bits(u32 dtype, u32 x) { return dtype == F16 ? from_f16(x & 0xffff) : from_bf16(x & 0xffff); }

template <int N> __device__ __forceinline__ void load(Floats from, u64 at, float (&x)[N]) {
    static_assert(N == 1 || N == 8, "one element or eight");
    if (N == 8 && from.dtype == F32) {
        float4 low = *(const float4*)((const float*)from.data + at), high = *(const float4*)((const float*)from.data + at + 4);
        x[0] = low.x, x[1 % N] = low.y, x[2 % N] = low.z, x[3 % N] = low.w;
        x[4 % N] = high.x, x[5 % N] = high.y, x[6 % N] = high.z, x[7 % N] = high.w;
    } else if (N == 8) {
        uint4 pairs = *(const uint4*)((const u16*)from.data + at);
        u32 pair[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = from_16_bits(from.dtype, pair[i / 2] >> 16 * (i % 2));
    } else if (from.dtype == F32) {
        x[0] = ((const float*)from.data)[at];
    } else {
        x[0] = from_16_bits(from.dtype, ((const u16*)from.data)[at]);
    }
}

template <int N> __device__ __forceinline__ void store(Floats to, u64 at, const float (&x)[N]) {
    if (N == 8 && to.dtype == F32) {
        float* out = (float*)to.data + at;
        *(float4*)out = make_float4(x[0], x[1 % N], x[2 % N], x[3 % N]);
        *(float4*)(out + 4) = make_float4(x[4 % N], x[5 % N], x[6 % N], x[7 % N]);
    } else if (N == 8) {
        uint4 pairs;
        pairs.x = to_16_bits(to.dtype, x[0], x[1 % N]), pairs.y = to_16_bits(to.dtype, x[2 % N], x[3 % N]);
        pairs.z = to_16_bits(to.dtype, x[4 % N], x[5 % N]), pairs.w = to_16_bits(to.dtype, x[6 % N], x[7 % N]);
        *(uint4*)((u16*)to.data + at) = pairs;
    } else if (to.dtype == F32) {
        ((float*)to.data)[at] = x[0];
    } else {
        ((u16*)to.data)[at] = to.dtype == F16 ? to_f16(x[0]) : to_bf16(x[0]);
    }
}

__device__ __forceinline__ float load_one(Floats from, u64 at) {
    float x[1];
    load<1>(from, at, x);
    return x[0];
}
__device__ __forceinline__ void store_one(Floats to, u64 at, float value) {
    float x[1] = {value};
    store<1>(to, at, x);
}

// As the CPU's: exact to two units in the last place, infinite above 89, never a NaN of an infinity.
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// Reductions of a warp, in an order of halves that is the same for every lane.
template <typename T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
__device__ __forceinline__ float larger(float a, float b) { return b > a ? b : a; }
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// The sum over the block, known to every thread. `parts` has room for 32; all threads come here.
template <typename T> __device__ __forceinline__ T block_sum(T x, T* parts) {
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    T all = 0;
    for (int warp = 0; warp < (blockDim.x + 31) / 32; warp++) all += parts[warp];
    __syncthreads();
    return all;
}

// Dropout by Philox4x32-10: see `Dropout` of the ops. A probability of 0 drops nothing.
struct Dropout {
    u64 seed;
    u32 site, step;
    // Words below it drop their element; what survives is multiplied by `keep`.
    u32 threshold;
    float keep;
};

__device__ __forceinline__ uint4 philox(u64 block, u32 site, u32 step, u64 seed) {
    u32 c0 = (u32)block, c1 = (u32)(block >> 32), c2 = site, c3 = step, k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 p0 = (u64)0xD2511F53u * c0, p1 = (u64)0xCD9E8D57u * c2;
        c0 = (u32)(p1 >> 32) ^ c1 ^ k0, c1 = (u32)p1;
        c2 = (u32)(p0 >> 32) ^ c3 ^ k1, c3 = (u32)p0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

__device__ __forceinline__ float dropout_factor(const Dropout& dropout, u32 word) {
    return word < dropout.threshold ? 0.f : dropout.keep;
}

__device__ __forceinline__ float dropout_one(const Dropout& dropout, u64 at) {
    uint4 words = philox(at / 4, dropout.site, dropout.step, dropout.seed);
    u32 word = at % 4 == 0 ? words.x : at % 4 == 1 ? words.y : at % 4 == 2 ? words.z : words.w;
    return dropout_factor(dropout, word);
}

// Multiplies the elements from `at` on, a multiple of N, by their factors.
template <int N> __device__ __forceinline__ void drop(const Dropout& dropout, u64 at, float (&x)[N]) {
    if (dropout.threshold == 0) return;
    if (N == 1) {
        x[0] *= dropout_one(dropout, at);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            uint4 words = philox(at / 4 + i / 4, dropout.site, dropout.step, dropout.seed);
            x[i] *= dropout_factor(dropout, words.x), x[(i + 1) % N] *= dropout_factor(dropout, words.y);
            x[(i + 2) % N] *= dropout_factor(dropout, words.z), x[(i + 3) % N] *= dropout_factor(dropout, words.w);
        }
    }
}

// The first thing that went wrong, in memory that the host reads: which submission, and which element held what.
struct Failure {
    u32 noted, submission, element, value;
};

// What a kernel that can fail is given. `stop` is of the device's own memory: the host hears of a failure when it next waits, and
// what was queued before that and changes what outlives a step looks here and does nothing.
struct Failing {
    Failure* failure;
    u32* stop;
    u32 submission;

    __device__ __forceinline__ void note(u32 element, u32 value) const {
        if (atomicExch(stop, 1u) == 0) failure->submission = submission, failure->element = element, failure->value = value, failure->noted = 1;
    }
};

// A kernel is a struct: its fields are the arguments, laid out as `arguments.rs` has them, and `run` is what every thread does.
#define KERNEL(name, Kernel) \
    extern "C" __global__ void name(const __grid_constant__ Kernel kernel) { kernel.run(); }

// Both widths of one.
#define WIDTHS(name, Kernel)                                                                        \
    extern "C" __global__ void name##_8(const __grid_constant__ Kernel kernel) { kernel.run<8>(); } \
    extern "C" __global__ void name##_1(const __grid_constant__ Kernel kernel) { kernel.run<1>(); }
