// Fused kernels of the CuPy backend: one pass over memory where the array module would make several.
//
// Compiled at run time by NVRTC (no headers), and in the tests also for the host. Every kernel exists for float and
// double; sums over a row are kept in the element type, in a fixed order, so results are the same every time.

// One step of Adam with decoupled weight decay (Loshchilov and Hutter, 2019) for n elements: reads parameter, gradient
// and both moments once, writes the new parameter and moments. The corrections of the bias follow from the step number
// (from 1), which stays on the device; one thread of a block works them out, in double, for all of them.
template <typename T>
__device__ void adamw(const T* parameter, const T* gradient, const T* first, const T* second, const long long* step,
                      T* new_parameter, T* new_first, T* new_second, long long n, double lr, double beta1,
                      double beta2, double eps, double weight_decay, double* shared) {
  if (threadIdx.x == 0) {
    shared[0] = lr / (1.0 - pow(beta1, (double)*step));
    shared[1] = sqrt(1.0 - pow(beta2, (double)*step));
  }
  __syncthreads();
  T rate = T(shared[0]), root = T(shared[1]), keep = T(1.0 - lr * weight_decay), tiny = T(eps);
  T new1 = T(1.0 - beta1), old2 = T(beta2), new2 = T(1.0 - beta2);
  long long stride = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
    T g = gradient[i];
    T m = first[i] + new1 * (g - first[i]);
    T v = old2 * second[i] + new2 * (g * g);
    new_first[i] = m;
    new_second[i] = v;
    new_parameter[i] = keep * parameter[i] - rate * (m / (sqrt(v) / root + tiny));
  }
}

// The sum of `value` over the threads of a block, given to all of them. `shared` holds one number per thread, and the
// number of threads is a power of two.
template <typename T>
__device__ T block_sum(T value, T* shared) {
  __syncthreads();  // the previous sum has been read by all
  shared[threadIdx.x] = value;
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  __syncthreads();
  return shared[0];
}

// Layer norm over rows of `width` elements, a block per row in turn: (x - mean) / sqrt(variance + eps) * weight + bias.
// The row is read twice, the second time from cache: the variance is taken from the centred numbers.
template <typename T>
__device__ void layer_norm(const T* x, const T* weight, const T* bias, T* out, long long rows, long long width, T eps,
                           T* shared) {
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* from = x + row * width;
    T sum = T(0);
    for (long long i = threadIdx.x; i < width; i += blockDim.x) sum += from[i];
    T mean = block_sum(sum, shared) / T(width);
    T squares = T(0);
    for (long long i = threadIdx.x; i < width; i += blockDim.x) squares += (from[i] - mean) * (from[i] - mean);
    T inverse = T(1) / sqrt(block_sum(squares, shared) / T(width) + eps);
    for (long long i = threadIdx.x; i < width; i += blockDim.x)
      out[row * width + i] = (from[i] - mean) * inverse * weight[i] + bias[i];
  }
}

// RMS norm over rows of `width` elements: x / sqrt(mean(x^2) + eps) * weight.
template <typename T>
__device__ void rms_norm(const T* x, const T* weight, T* out, long long rows, long long width, T eps, T* shared) {
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* from = x + row * width;
    T squares = T(0);
    for (long long i = threadIdx.x; i < width; i += blockDim.x) squares += from[i] * from[i];
    T inverse = T(1) / sqrt(block_sum(squares, shared) / T(width) + eps);
    for (long long i = threadIdx.x; i < width; i += blockDim.x) out[row * width + i] = from[i] * inverse * weight[i];
  }
}

#define MOST_THREADS 1024

#define DEFINE(T, suffix)                                                                                              \
  extern "C" __global__ void adamw_##suffix(const T* parameter, const T* gradient, const T* first, const T* second,    \
                                            const long long* step, T* new_parameter, T* new_first, T* new_second,      \
                                            long long n, double lr, double beta1, double beta2, double eps,            \
                                            double weight_decay) {                                                     \
    __shared__ double shared[2];                                                                                       \
    adamw(parameter, gradient, first, second, step, new_parameter, new_first, new_second, n, lr, beta1, beta2, eps,    \
          weight_decay, shared);                                                                                       \
  }                                                                                                                    \
  extern "C" __global__ void layer_norm_##suffix(const T* x, const T* weight, const T* bias, T* out, long long rows,   \
                                                 long long width, T eps) {                                             \
    __shared__ T shared[MOST_THREADS];                                                                                 \
    layer_norm(x, weight, bias, out, rows, width, eps, shared);                                                        \
  }                                                                                                                    \
  extern "C" __global__ void rms_norm_##suffix(const T* x, const T* weight, T* out, long long rows, long long width,   \
                                               T eps) {                                                                \
    __shared__ T shared[MOST_THREADS];                                                                                 \
    rms_norm(x, weight, out, rows, width, eps, shared);                                                                \
  }

DEFINE(float, f32)
DEFINE(double, f64)
