// Element by element: cast, add, dropout, GELU and its backward. Bytes are the floor: each is read and written once.

#include "common.cuh"

// Every group of N elements goes to one thread; the grid is a fixed stride that covers all.
#define EACH(at) for (u64 at = N * (blockIdx.x * (u64)blockDim.x + threadIdx.x); at < count; at += N * (u64)gridDim.x * blockDim.x)

struct Fill {
    Floats out;
    float value;
    u64 count;

    template <int N> __device__ __forceinline__ void run() const {
        float x[N];
        for (int i = 0; i < N; i++) x[i] = value;
        EACH(at) store<N>(out, at, x);
    }
};
WIDTHS(fill, Fill)

struct Cast {
    Floats input, out;
    u64 count;

    template <int N> __device__ __forceinline__ void run() const {
        EACH(at) {
            float x[N];
            load<N>(input, at, x);
            store<N>(out, at, x);
        }
    }
};
WIDTHS(cast, Cast)

struct Add {
    Floats input, out;
    u64 count;

    template <int N> __device__ __forceinline__ void run() const {
        EACH(at) {
            float x[N], y[N];
            load<N>(input, at, x);
            load<N>(out, at, y);
            for (int i = 0; i < N; i++) y[i] += x[i];
            store<N>(out, at, y);
        }
    }
};
WIDTHS(add, Add)

struct Drop {
    Floats data;
    Dropout dropout;
    u64 count;

    template <int N> __device__ __forceinline__ void run() const {
        EACH(at) {
            float x[N];
            load<N>(data, at, x);
            drop<N>(dropout, at, x);
            store<N>(data, at, x);
        }
    }
};
WIDTHS(dropout, Drop)

// √(8/π) x (1 + 0.044715 x²): GELU's tanh form is x · sigmoid of it.
__device__ __forceinline__ float tanh_argument(float x) { return 1.595769f * x * (1.f + 0.044715f * x * x); }

__device__ __forceinline__ float gelu_tanh(float x) { return x * sigmoid(tanh_argument(x)); }

__device__ __forceinline__ float gelu_tanh_slope(float x) {
    float s = sigmoid(tanh_argument(x));
    // From |x| = 100 on `s (1 - s)` is 0, which must not meet an infinity.
    float square = x * x, bounded = x;
    if (square > 1e4f) square = 1e4f;
    if (bounded > 100.f) bounded = 100.f;
    if (bounded < -100.f) bounded = -100.f;
    return s + bounded * s * (1.f - s) * 1.595769f * (1.f + 3.f * 0.044715f * square);
}

// By erfc, which keeps the tail where 1 + erf would lose it.
__device__ __forceinline__ float normal_cdf(float x) { return 0.5f * erfcf(-0.70710678f * x); }

__device__ __forceinline__ float gelu_erf(float x) { return x * normal_cdf(x); }

__device__ __forceinline__ float gelu_erf_slope(float x) { return normal_cdf(x) + x * 0.3989423f * expf(-0.5f * x * x); }

struct Gelu {
    Floats input, out;
    u64 count;
    u32 erf;

    template <int N> __device__ __forceinline__ void run() const {
        EACH(at) {
            float x[N];
            load<N>(input, at, x);
            for (int i = 0; i < N; i++) x[i] = erf ? gelu_erf(x[i]) : gelu_tanh(x[i]);
            store<N>(out, at, x);
        }
    }
};
WIDTHS(gelu, Gelu)

struct GeluBackward {
    Floats input, gradient;
    u64 count;
    u32 erf;

    template <int N> __device__ __forceinline__ void run() const {
        EACH(at) {
            float x[N], g[N];
            load<N>(input, at, x);
            load<N>(gradient, at, g);
            for (int i = 0; i < N; i++) g[i] *= erf ? gelu_erf_slope(x[i]) : gelu_tanh_slope(x[i]);
            store<N>(gradient, at, g);
        }
    }
};
WIDTHS(gelu_backward, GeluBackward)

struct FillWords {
    u32* out;
    u64 count;
    u32 value, unused;

    __device__ __forceinline__ void run() const {
        u64 stride = (u64)gridDim.x * blockDim.x;
        for (u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x; at < count; at += stride) out[at] = value;
    }
};
KERNEL(fill_words, FillWords)
