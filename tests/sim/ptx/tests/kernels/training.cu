// Kernels of the kinds that a training runtime needs, for the interpreter's tests: what they compute is written again, in Rust,
// beside each test.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned u32;
typedef unsigned long long u64;

__device__ float block_sum(float value) {
    __shared__ float partial[32];
    for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(~0u, value, offset);
    if (!(threadIdx.x & 31)) partial[threadIdx.x >> 5] = value;
    __syncthreads();
    value = threadIdx.x < (blockDim.x >> 5) ? partial[threadIdx.x] : 0.f;
    for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(~0u, value, offset);
    if (!threadIdx.x) partial[0] = value;
    __syncthreads();
    value = partial[0];
    __syncthreads();
    return value;
}

// y = x + a * y over n elements, four at a time.
extern "C" __global__ void axpy(float4* y, const float4* x, float a, int quads) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= quads) return;
    float4 v = y[i], w = x[i];
    y[i] = make_float4(w.x + a * v.x, w.y + a * v.y, w.z + a * v.z, w.w + a * v.w);
}

// One block a row: y = (x - mean) * rstd.
extern "C" __global__ void layer_norm(const __half* x, __half* y, float* rstd_out, int columns) {
    const __half* row = x + (size_t)blockIdx.x * columns;
    float sum = 0, squares = 0;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += __half2float(row[i]);
    float mean = block_sum(sum) / columns;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float d = __half2float(row[i]) - mean;
        squares += d * d;
    }
    float rstd = rsqrtf(block_sum(squares) / columns + 1e-5f);
    if (!threadIdx.x) rstd_out[blockIdx.x] = rstd;
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        y[(size_t)blockIdx.x * columns + i] = __float2half((__half2float(row[i]) - mean) * rstd);
}

// Loss and gradient of softmax cross-entropy; the loss is added up over rows by atomics.
extern "C" __global__ void cross_entropy(const float* logits, const int* targets, float* loss, float* grad, int classes) {
    const float* row = logits + (size_t)blockIdx.x * classes;
    __shared__ u32 highest;
    if (!threadIdx.x) highest = 0;
    __syncthreads();
    float top = -1e30f;
    for (int i = threadIdx.x; i < classes; i += blockDim.x) top = fmaxf(top, row[i]);
    u32 key = __float_as_uint(top);
    key = __reduce_max_sync(~0u, key >> 31 ? ~key : key | 0x80000000u);
    if (!(threadIdx.x & 31)) atomicMax(&highest, key);
    __syncthreads();
    key = highest;
    top = __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
    float sum = 0;
    for (int i = threadIdx.x; i < classes; i += blockDim.x) sum += expf(row[i] - top);
    sum = block_sum(sum);
    int target = targets[blockIdx.x];
    if (!threadIdx.x) atomicAdd(loss, logf(sum) + top - row[target]);
    for (int i = threadIdx.x; i < classes; i += blockDim.x)
        grad[(size_t)blockIdx.x * classes + i] = expf(row[i] - top) / sum - (i == target ? 1.f : 0.f);
}

// Tanh-form GELU on pairs of halves, in the half arithmetic that the hardware has.
extern "C" __global__ void half_arithmetic(const __half2* a, const __half2* b, __half2* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i * 4] = __hadd2(a[i], b[i]);
    out[i * 4 + 1] = __hfma2(a[i], b[i], a[i]);
    out[i * 4 + 2] = __hmul2(a[i], b[i]);
    out[i * 4 + 3] = __hmax2(a[i], b[i]);
}

extern "C" __global__ void bf16_arithmetic(const __nv_bfloat162* a, const __nv_bfloat162* b, __nv_bfloat162* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float2 x = __bfloat1622float2(a[i]), y = __bfloat1622float2(b[i]);
    out[i * 3] = __floats2bfloat162_rn(x.x * y.x, x.y * y.y);
    out[i * 3 + 1] = __hfma2(a[i], b[i], a[i]);
    out[i * 3 + 2] = __hadd2(a[i], b[i]);
}

// f32 -> int8 with the scale of each group of 32, one warp a group.
extern "C" __global__ void quantise(const float* x, signed char* q, float* scales, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = i < n ? x[i] : 0.f;
    float top = fabsf(v);
    for (int offset = 16; offset; offset >>= 1) top = fmaxf(top, __shfl_down_sync(~0u, top, offset));
    top = __shfl_sync(~0u, top, 0);
    float scale = top / 127.f;
    if (i < n) q[i] = (signed char)__float2int_rn(scale > 0 ? v / scale : 0.f);
    if (!(threadIdx.x & 31)) scales[i >> 5] = scale;
}

// Everything that integers do; 64-bit division is inlined or called, as the compiler likes.
extern "C" __global__ void integers(const u64* a, const u64* b, u64* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 x = a[i], y = b[i];
    u32 lo = (u32)x, hi = (u32)(x >> 32);
    u64* o = out + (size_t)i * 16;
    o[0] = x / (y | 1);
    o[1] = x % (y | 1);
    o[2] = __umul64hi(x, y);
    o[3] = __popcll(x) + 100 * __clz(lo) + 10000 * __ffs(hi);
    o[4] = __brev(lo);
    o[5] = __byte_perm(lo, hi, 0x2561);
    o[6] = __funnelshift_l(lo, hi, (u32)y);
    o[7] = (u64)((long long)x / (long long)((int)y | 1));
    o[8] = (lo & hi) ^ (~lo | (u32)y);
    o[9] = __umulhi(lo, hi);
    o[10] = min((int)lo, (int)hi);
    o[11] = (u64)(long long)(short)lo;
    o[12] = lo % (hi | 1);
    o[13] = (u64)((long long)((int)lo / ((int)hi | 1)));
    o[14] = __brevll(x);
    o[15] = x * y + (x << (y & 63)) - (u64)((long long)x >> (y & 63));
}

// Lanes go different ways and meet again: Collatz steps of each number.
extern "C" __global__ void collatz(const u32* start, u32* steps, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 x = start[i], count = 0;
    while (x != 1) {
        if (x & 1) x = 3 * x + 1; else x >>= 1;
        count++;
    }
    u32 ballot = __ballot_sync(__activemask(), count & 1);
    steps[i * 2] = count;
    steps[i * 2 + 1] = ballot;
}

__constant__ float levels[16] = {-1.f, -.6962f, -.5251f, -.3949f, -.2844f, -.1848f, -.0911f, 0.f,
                                 .0796f, .1609f, .2461f, .3379f, .4407f, .5626f, .723f, 1.f};

// Four-bit codes by a table in constant memory, through an array in local memory whose index is not known before.
extern "C" __global__ void dequantise(const unsigned char* q, float* y, int n, int turn) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float pair[8];
    for (int k = 0; k < 8; k++) pair[(k + turn) & 7] = levels[(k & 1 ? q[i] >> 4 : q[i] & 15)];
    y[i * 2] = pair[turn & 7];
    y[i * 2 + 1] = pair[(turn + 1) & 7];
}
