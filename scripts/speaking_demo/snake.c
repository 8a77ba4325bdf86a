/* BigVGAN's anti-aliased SnakeBeta: twice the rate, x + sin(a x)^2 / b, the old rate again; 12 taps each.
   Forward and backward of rows [rows, length], whose parameters repeat after `channels` rows. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TAPS 6 /* of each phase of the filter */
#define EDGE 3

static void pad(const float *x, float *padded, long length) {
  for (int i = 0; i < EDGE; i++) {
    padded[i] = x[0];
    padded[EDGE + length + i] = x[length - 1];
  }
  memcpy(padded + EDGE, x, length * sizeof(float));
}

static void upsample(const float *padded, const float *filter, float *even, float *odd, long length) {
  for (long t = 0; t < length; t++) {
    float e = 0, o = 0;
    for (int k = 0; k < TAPS; k++) {
      e += filter[2 * k] * padded[t + k];
      o += filter[2 * k + 1] * padded[t + k + 1];
    }
    even[t] = 2 * e;
    odd[t] = 2 * o;
  }
}

void snake_forward(const float *x, const float *alpha, const float *inverse_beta, const float *filter, float *y,
                   long rows, long channels, long length) {
#pragma omp parallel for
  for (long r = 0; r < rows; r++) {
    float *work = malloc((length * 5 + 64) * sizeof(float));
    float *padded = work, *even = padded + length + 8, *odd = even + length;
    float *shaped_even = odd + length, *shaped_odd = shaped_even + length + 8;
    float a = alpha[r % channels], b = inverse_beta[r % channels];
    pad(x + r * length, padded, length);
    upsample(padded, filter, even, odd, length);
    for (long t = 0; t < length; t++) {
      float s = sinf(a * even[t]), u = sinf(a * odd[t]);
      shaped_even[t + 2] = even[t] + b * s * s;
      shaped_odd[t + 3] = odd[t] + b * u * u;
    }
    float first = shaped_even[2], last = shaped_odd[length + 2];
    shaped_even[0] = shaped_even[1] = shaped_odd[0] = shaped_odd[1] = shaped_odd[2] = first;
    shaped_even[length + 2] = shaped_even[length + 3] = shaped_even[length + 4] = last;
    shaped_odd[length + 3] = shaped_odd[length + 4] = last;
    float *out = y + r * length;
    for (long t = 0; t < length; t++) {
      float sum = 0;
      for (int k = 0; k < TAPS; k++)
        sum += filter[2 * k + 1] * shaped_even[t + k] + filter[2 * k] * shaped_odd[t + k];
      out[t] = sum;
    }
    free(work);
  }
}

/* grad_alpha and grad_inverse_beta: one value per row. */
void snake_backward(const float *x, const float *alpha, const float *inverse_beta, const float *filter,
                    const float *grad_y, float *grad_x, float *grad_alpha, float *grad_inverse_beta, long rows,
                    long channels, long length) {
#pragma omp parallel for
  for (long r = 0; r < rows; r++) {
    float *work = calloc(length * 7 + 128, sizeof(float));
    float *padded = work, *even = padded + length + 8, *odd = even + length;
    float *grad_even = odd + length, *grad_odd = grad_even + length + 8;
    float *grad_padded = grad_odd + length + 8, *incoming = grad_padded + length + 16;
    float a = alpha[r % channels], b = inverse_beta[r % channels];
    pad(x + r * length, padded, length);
    upsample(padded, filter, even, odd, length);
    memcpy(incoming + 5, grad_y + r * length, length * sizeof(float));
    for (long t = 0; t < length + 5; t++) {
      float e = 0, o = 0;
      for (int k = 0; k < TAPS; k++) {
        e += filter[2 * k + 1] * incoming[t + 5 - k];
        o += filter[2 * k] * incoming[t + 5 - k];
      }
      grad_even[t] = e;
      grad_odd[t] = o;
    }
    float *e = grad_even + 2, *o = grad_odd + 3; /* where the padding at both ends was copied from */
    e[0] += grad_even[0] + grad_even[1] + grad_odd[0] + grad_odd[1] + grad_odd[2];
    o[length - 1] += grad_even[length + 2] + grad_even[length + 3] + grad_even[length + 4] + grad_odd[length + 3] +
                     grad_odd[length + 4];
    float sum_alpha = 0, sum_beta = 0;
    for (long t = 0; t < length; t++) {
      float s = sinf(a * even[t]), sin2 = 2 * s * cosf(a * even[t]);
      float u = sinf(a * odd[t]), odd_sin2 = 2 * u * cosf(a * odd[t]);
      sum_alpha += b * (e[t] * even[t] * sin2 + o[t] * odd[t] * odd_sin2);
      sum_beta += e[t] * s * s + o[t] * u * u;
      even[t] = e[t] * (1 + b * a * sin2);
      odd[t] = o[t] * (1 + b * a * odd_sin2);
    }
    grad_alpha[r] = sum_alpha;
    grad_inverse_beta[r] = sum_beta;
    for (int k = 0; k < TAPS; k++) {
      float fe = 2 * filter[2 * k], fo = 2 * filter[2 * k + 1];
      for (long t = 0; t < length; t++) grad_padded[t + k] += fe * even[t];
      for (long t = 0; t < length; t++) grad_padded[t + k + 1] += fo * odd[t];
    }
    float *out = grad_x + r * length;
    memcpy(out, grad_padded + EDGE, length * sizeof(float));
    for (int i = 0; i < EDGE; i++) {
      out[0] += grad_padded[i];
      out[length - 1] += grad_padded[length + EDGE + i];
    }
    free(work);
  }
}
