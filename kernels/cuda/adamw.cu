// AdamW over flat parameters, 28 bytes an element. Under a loss scale it reads on the device whether the step is skipped and which
// update it is, so the host is not asked.

#include "common.cuh"

// By squares: exact to the last few bits for any number of steps.
__device__ double power(double base, u64 exponent) {
    double result = 1;
    for (; exponent; exponent /= 2, base *= base)
        if (exponent % 2) result *= base;
    return result;
}

struct AdamW {
    float learning_rate, beta1, beta2, epsilon, weight_decay;
    u32 unused;
    u64 step;
};

// `gradient_scale`, `found_inf` and `applied` may be null; with `applied` the update's number is one more than it says.
struct Update {
    float* parameters;
    const float* gradients;
    float* first_moment;
    float* second_moment;
    u64 count;
    const float* gradient_scale;
    const float* found_inf;
    const u32* applied;
    const u32* stop;
    AdamW c;

    template <int N> __device__ __forceinline__ void run() const {
        if (*stop || (found_inf && *found_inf != 0.f)) return;
        __shared__ float factors[2];
        if (threadIdx.x == 0) {
            u64 step = applied ? (u64)*applied + 1 : c.step;
            factors[0] = (float)((double)c.learning_rate / (1.0 - power((double)c.beta1, step)));
            factors[1] = (float)(1.0 / sqrt(1.0 - power((double)c.beta2, step)));
        }
        __syncthreads();
        float rate = factors[0];
        float root = factors[1];
        float scale = gradient_scale ? *gradient_scale : 1.f;
        float keep = (float)(1.0 - (double)c.learning_rate * (double)c.weight_decay);
        float blend1 = (float)(1.0 - (double)c.beta1);
        float blend2 = (float)(1.0 - (double)c.beta2);
        Floats p = {parameters, F32};
        Floats g = {(void*)gradients, F32};
        Floats m = {first_moment, F32};
        Floats v = {second_moment, F32};
        for (u64 at = N * (blockIdx.x * (u64)blockDim.x + threadIdx.x); at < count; at += N * (u64)gridDim.x * blockDim.x) {
            float pi[N], gi[N], mi[N], vi[N];
            load<N>(p, at, pi);
            load<N>(g, at, gi);
            load<N>(m, at, mi);
            load<N>(v, at, vi);
            for (int i = 0; i < N; i++) {
                float gradient = gi[i] * scale;
                mi[i] += blend1 * (gradient - mi[i]);
                vi[i] = c.beta2 * vi[i] + blend2 * gradient * gradient;
                pi[i] = pi[i] * keep - rate * mi[i] / (sqrtf(vi[i]) * root + c.epsilon);
            }
            store<N>(p, at, pi);
            store<N>(m, at, mi);
            store<N>(v, at, vi);
        }
    }
};
WIDTHS(adamw, Update)
