// Softmax cross-entropy and its gradient in place: a block a row, which goes over it twice, or once without a gradient.
//
// A row of a vocabulary that is no multiple of eight begins anywhere, so each row has a head and a tail of single elements.

#include "common.cuh"

// Elements of the row before the first whose address is a multiple of eight of the matrix's.
__device__ __forceinline__ u32 head_of(u64 start, u32 length) {
    u32 head = (u32)((8 - start % 8) % 8);
    return head < length ? head : length;
}

// A running maximum and the sum of exponentials of differences from it.
struct Softmax {
    float max, sum;
};

__device__ __forceinline__ Softmax joined(Softmax a, Softmax b) {
    float max = larger(a.max, b.max);
    // Where nothing but -inf was seen, -inf - -inf would make NaN of what a later one can still outweigh.
    float shift = max == -infinity() ? 0.f : max;
    return {max, a.sum * expf(a.max - shift) + b.sum * expf(b.max - shift)};
}

template <int N> __device__ __forceinline__ void take(Softmax& state, const float (&x)[N]) {
    float max = x[0];
    for (int i = 1; i < N; i++) max = larger(max, x[i]);
    max = larger(state.max, max);
    float shift = max == -infinity() ? 0.f : max, sum = state.sum * expf(state.max - shift);
    for (int i = 0; i < N; i++) sum += expf(x[i] - shift);
    state = {max, sum};
}

// `with_gradient` overwrites the logits; `loss_scale` may be null.
struct CrossEntropy {
    Floats logits;
    const int* targets;
    float* losses;
    u32 vocabulary, with_gradient;
    float gradient_scale;
    const float* loss_scale;
    Failing failing;

    template <int N> __device__ __forceinline__ void run() const {
        __shared__ float maxima[32];
        __shared__ float sums[32];
        u32 row = blockIdx.x;
        int target = targets[row];
        u64 start = (u64)row * vocabulary;
        u32 head = N == 1 ? 0 : head_of(start, vocabulary);
        u32 vectors = (vocabulary - head) / N;
        u32 tail = head + vectors * N;
        bool ignored = target < 0;
        if (!ignored && (u32)target >= vocabulary) {
            if (threadIdx.x == 0) failing.note(row, (u32)target);
            ignored = true;
        }
        Softmax state = {-infinity(), 0.f};
        if (!ignored) {
            float one[1];
            for (u32 i = threadIdx.x; i < head + (vocabulary - tail); i += blockDim.x) {
                load<1>(logits, start + (i < head ? i : tail + (i - head)), one);
                take<1>(state, one);
            }
            for (u32 i = threadIdx.x; i < vectors; i += blockDim.x) {
                float x[N];
                load<N>(logits, start + head + N * i, x);
                take<N>(state, x);
            }
            for (int step = 16; step > 0; step /= 2) {
                Softmax other = {__shfl_xor_sync(~0u, state.max, step), __shfl_xor_sync(~0u, state.sum, step)};
                state = joined(state, other);
            }
            if ((threadIdx.x & 31) == 0) {
                maxima[threadIdx.x / 32] = state.max;
                sums[threadIdx.x / 32] = state.sum;
            }
            __syncthreads();
            state = {-infinity(), 0.f};
            for (u32 warp = 0; warp < blockDim.x / 32; warp++) {
                Softmax other = {maxima[warp], sums[warp]};
                state = joined(state, other);
            }
            if (threadIdx.x == 0) losses[row] = state.max + logf(state.sum) - load_one(logits, start + target);
            // The target's logit is read before it is overwritten.
            __syncthreads();
        } else if (threadIdx.x == 0) {
            losses[row] = 0.f;
        }
        if (with_gradient) {
            float scale = gradient_scale * (loss_scale ? *loss_scale : 1.f);
            float inverse = ignored ? 0.f : 1.f / state.sum;
            auto gradient = [&](float x, u32 column) {
                if (ignored) return 0.f;
                float p = expf(x - state.max) * inverse;
                return ((u32)target == column ? p - 1.f : p) * scale;
            };
            for (u32 i = threadIdx.x; i < head + (vocabulary - tail); i += blockDim.x) {
                u32 column = i < head ? i : tail + (i - head);
                store_one(logits, start + column, gradient(load_one(logits, start + column), column));
            }
            for (u32 i = threadIdx.x; i < vectors; i += blockDim.x) {
                u32 column = head + N * i;
                float x[N];
                load<N>(logits, start + column, x);
                for (int j = 0; j < N; j++) x[j] = gradient(x[j], column + j);
                store<N>(logits, start + column, x);
            }
        }
    }
};
WIDTHS(cross_entropy, CrossEntropy)
