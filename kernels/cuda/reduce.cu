// Sums in f64 over fixed chunks, the gradients' norm, the loss scaler, and comparisons. What is reduced to one number takes two
// launches: a partial a block, then one block that adds those in order. Partials are f64 in scratch of the stream's own.

#include "common.cuh"

#define CHUNKS(at) for (u64 at = N * (blockIdx.x * (u64)blockDim.x + threadIdx.x); at < count; at += N * (u64)gridDim.x * blockDim.x)

struct SumPartials {
    Floats input;
    u64 count;
    double* partials;

    template <int N> __device__ __forceinline__ void run() const {
        __shared__ double parts[32];
        double sum = 0;
        CHUNKS(at) {
            float x[N];
            load<N>(input, at, x);
            for (int i = 0; i < N; i++) sum += (double)x[i];
        }
        sum = block_sum(sum, parts);
        if (threadIdx.x == 0) partials[blockIdx.x] = sum;
    }
};
WIDTHS(sum_partials, SumPartials)

struct SumSquaresPartials {
    Floats input;
    u64 count;
    double* partials;

    template <int N> __device__ __forceinline__ void run() const {
        __shared__ double parts[32];
        double sum = 0;
        CHUNKS(at) {
            float x[N];
            load<N>(input, at, x);
            for (int i = 0; i < N; i++) sum += (double)x[i] * (double)x[i];
        }
        sum = block_sum(sum, parts);
        if (threadIdx.x == 0) partials[blockIdx.x] = sum;
    }
};
WIDTHS(sum_squares_partials, SumSquaresPartials)

// Gradients times the inverse of their scale, whether one was not finite before or after, and their squares.
struct UnscalePartials {
    float* gradients;
    u64 count;
    const float* scale;
    float* found_inf;
    double* partials;

    template <int N> __device__ __forceinline__ void run() const {
        __shared__ double parts[32];
        float inverse = (float)(1.0 / (double)*scale);
        Floats own = {gradients, F32};
        double sum = 0;
        bool finite = true;
        CHUNKS(at) {
            float x[N];
            load<N>(own, at, x);
            for (int i = 0; i < N; i++) {
                float unscaled = x[i] * inverse;
                finite = finite && is_finite(x[i]) && is_finite(unscaled);
                x[i] = unscaled;
                sum += (double)unscaled * (double)unscaled;
            }
            store<N>(own, at, x);
        }
        sum = block_sum(sum, parts);
        if (threadIdx.x == 0) partials[blockIdx.x] = sum;
        // Every block that finds one stores the same.
        if (!finite) atomicExch(found_inf, 1.f);
    }
};
WIDTHS(unscale_partials, UnscalePartials)

__device__ __forceinline__ double total(const double* partials, u32 count, double* parts) {
    double sum = 0;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    return block_sum(sum, parts);
}

// out += total · scale, or out = total where `accumulate` is 0.
struct SumFinish {
    const double* partials;
    float* out;
    u32 count;
    float scale;
    u32 accumulate, unused;

    __device__ __forceinline__ void run() const {
        __shared__ double parts[32];
        double sum = total(partials, count, parts);
        if (threadIdx.x == 0) *out = accumulate ? *out + (float)(sum * (double)scale) : (float)sum;
    }
};
KERNEL(sum_finish, SumFinish)

struct ClipCoefficient {
    const float* sum_squares;
    u64 count;
    float* norm;
    float* coefficient;
    float max_norm;
    u32 unused;

    __device__ __forceinline__ void run() const {
        __shared__ double parts[32];
        double sum = 0;
        for (u64 i = threadIdx.x; i < count; i += blockDim.x) sum += (double)sum_squares[i];
        sum = block_sum(sum, parts);
        if (threadIdx.x == 0) {
            float length = (float)sqrt(sum), factor = max_norm / (length + 1e-6f);
            *norm = length;
            // Not a minimum, which would make 1 of NaN.
            *coefficient = factor > 1.f ? 1.f : factor;
        }
    }
};
KERNEL(clip_coefficient, ClipCoefficient)

// See `ScalerRules` and `ScalerCounter` of the ops.
enum { GROWTH, OVERFLOWS, AT_FLOOR, APPLIED, SKIPPED };

struct ScalerUpdate {
    float* scale;
    u32* counters;
    float* found_inf;
    const u32* stop;
    float growth, backoff, floor;
    u32 interval, hysteresis, unused;

    __device__ __forceinline__ void run() const {
        if (*stop) return;
        if (*found_inf != 0.f) {
            *found_inf = 0.f;
            counters[SKIPPED]++;
            counters[GROWTH] = 0;
            counters[AT_FLOOR] = *scale <= floor ? counters[AT_FLOOR] + 1 : 0;
            if (++counters[OVERFLOWS] >= hysteresis) {
                float smaller = *scale * backoff;
                *scale = smaller > floor ? smaller : floor;
            }
            return;
        }
        counters[APPLIED]++;
        counters[AT_FLOOR] = 0;
        if (++counters[GROWTH] >= interval) {
            counters[GROWTH] = counters[OVERFLOWS] = 0;
            float larger = *scale * growth;
            if (is_finite(larger)) *scale = larger;
        }
    }
};
KERNEL(scaler_update, ScalerUpdate)

// The largest difference; of numbers that are finite on one side alone infinity, on neither 0.
struct MaxDifferencePartials {
    Floats input, other;
    u64 count;
    float* partials;

    template <int N> __device__ __forceinline__ void run() const {
        __shared__ float parts[32];
        float most = 0.f;
        CHUNKS(at) {
            float x[N], y[N];
            load<N>(input, at, x);
            load<N>(other, at, y);
            for (int i = 0; i < N; i++) {
                bool a = is_finite(x[i]);
                bool b = is_finite(y[i]);
                most = larger(most, a && b ? fabsf(x[i] - y[i]) : a == b ? 0.f : infinity());
            }
        }
        most = warp_max(most);
        if ((threadIdx.x & 31) == 0) parts[threadIdx.x / 32] = most;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (u32 warp = 1; warp < blockDim.x / 32; warp++) most = larger(most, parts[warp]);
            partials[blockIdx.x] = most;
        }
    }
};
WIDTHS(max_difference_partials, MaxDifferencePartials)

struct MaxDifferenceFinish {
    const float* partials;
    float* out;
    u32 count, unused;

    __device__ __forceinline__ void run() const {
        float most = 0.f;
        for (u32 i = threadIdx.x; i < count; i += 32) most = larger(most, partials[i]);
        most = warp_max(most);
        if (threadIdx.x == 0) *out = larger(*out, most);
    }
};
KERNEL(max_difference_finish, MaxDifferenceFinish)

// A checksum whose order of additions does not matter: each 8 bytes are mixed with their place (the finaliser of SplitMix64:
// Steele, Lea and Flood, 2014), and the results added.
__device__ __forceinline__ u64 mixed(u64 x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

struct ChecksumPartials {
    const u8* bytes;
    u64 count;
    u64* partials;

    __device__ __forceinline__ void run() const {
        __shared__ u64 parts[32];
        u64 sum = 0, words = (count + 7) / 8;
        for (u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x; at < words; at += (u64)gridDim.x * blockDim.x) {
            u64 word = 0;
            if ((u64)bytes % 8 == 0 && 8 * at + 8 <= count) word = ((const u64*)bytes)[at];
            else
                for (u32 i = 0; i < 8 && 8 * at + i < count; i++) word |= (u64)bytes[8 * at + i] << 8 * i;
            sum += mixed(word ^ mixed(at + 1));
        }
        sum = block_sum(sum, parts);
        if (threadIdx.x == 0) partials[blockIdx.x] = sum;
    }
};
KERNEL(checksum_partials, ChecksumPartials)

struct ChecksumFinish {
    const u64* partials;
    u32* out;
    u64 length;
    u32 count, unused;

    __device__ __forceinline__ void run() const {
        __shared__ u64 parts[32];
        u64 sum = 0;
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
        sum = mixed(block_sum(sum, parts) ^ length);
        if (threadIdx.x == 0) out[0] = (u32)sum, out[1] = (u32)(sum >> 32);
    }
};
KERNEL(checksum_finish, ChecksumFinish)
