#pragma once

// Private to core: what it compiles to depends on the instruction set.
//
// Fixed-width vectors for the inner loops of the recurrences. Every sum has one order, fixed here, so a dot product
// gives the same bits wherever it is computed: token by token or in blocks, on any number of threads.

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __FMA__
#include <immintrin.h>
#endif

namespace replayssm {

/// a b + c with one rounding where the hardware has it. For any scalar type.
template <class Real>
inline Real mul_add(const Real& a, const Real& b, const Real& c) {
  return a * b + c;
}

#ifdef __FMA__
inline double mul_add(double a, double b, double c) { return std::fma(a, b, c); }
inline float mul_add(float a, float b, float c) { return std::fma(a, b, c); }
#endif

/// `width` scalars that are computed with together. One scalar for types that the hardware does not know.
template <class Real>
struct Lanes {
  static constexpr std::int64_t width = 1;
  using Vector = Real;
  static Vector splat(const Real& x) { return x; }
  static Vector load(const Real* p) { return *p; }
  static void store(Real* p, const Vector& v) { *p = v; }
  static Vector load_part(const Real*, std::int64_t) { return Real(0); }
  static void store_part(Real*, std::int64_t, const Vector&) {}
  static Vector first(const Vector&, std::int64_t) { return Real(0); }
  static Real sum(const Vector& v) { return v; }
};

template <class Real, int Width>
struct HardwareLanes {
  static constexpr std::int64_t width = Width;
  typedef Real Vector __attribute__((vector_size(sizeof(Real) * Width)));

  static Vector splat(Real x) { return x - Vector{}; }
  static Vector load(const Real* p) {
    Vector v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(Real* p, Vector v) { std::memcpy(p, &v, sizeof v); }
  /// The first `count` < width scalars, the rest 0.
  static Vector load_part(const Real* p, std::int64_t count) {
    Vector v{};
    std::memcpy(&v, p, sizeof(Real) * static_cast<std::size_t>(count));
    return v;
  }
  static void store_part(Real* p, std::int64_t count, Vector v) {
    std::memcpy(p, &v, sizeof(Real) * static_cast<std::size_t>(count));
  }
  /// v with the lanes from `count` on set to 0.
  static Vector first(Vector v, std::int64_t count) {
    Real part[Width];
    store(part, v);
    return load_part(part, count);
  }
  /// Pairwise: halves are added until one is left.
  static Real sum(Vector v) {
    Real part[Width];
    std::memcpy(part, &v, sizeof v);
    for (int half = Width / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) part[i] += part[i + half];
    }
    return part[0];
  }
};

template <>
struct Lanes<double> : HardwareLanes<double, 4> {};
template <>
struct Lanes<float> : HardwareLanes<float, 8> {};

#ifdef __FMA__
inline Lanes<double>::Vector mul_add(Lanes<double>::Vector a, Lanes<double>::Vector b, Lanes<double>::Vector c) {
  return reinterpret_cast<Lanes<double>::Vector>(_mm256_fmadd_pd(a, b, c));
}
inline Lanes<float>::Vector mul_add(Lanes<float>::Vector a, Lanes<float>::Vector b, Lanes<float>::Vector c) {
  return reinterpret_cast<Lanes<float>::Vector>(_mm256_fmadd_ps(a, b, c));
}
#endif

/// z[j, i] = sum_n s[i, n] x[j, n] for `Rows` rows of s and `Columns` rows of x at once.
template <class Real, int Rows, int Columns>
inline void dots_block(const Real* s, std::int64_t s_stride, const Real* const* x, std::int64_t n, Real* z,
                       std::int64_t z_stride) {
  using L = Lanes<Real>;
  typename L::Vector acc[Rows][Columns];
  for (auto& row : acc) {
    for (auto& a : row) a = L::splat(Real(0));
  }
  std::int64_t k = 0;
  for (; k + L::width <= n; k += L::width) {
    typename L::Vector v[Columns];
    for (int j = 0; j < Columns; ++j) v[j] = L::load(x[j] + k);
    for (int i = 0; i < Rows; ++i) {
      const auto row = L::load(s + i * s_stride + k);
      for (int j = 0; j < Columns; ++j) acc[i][j] = mul_add(row, v[j], acc[i][j]);
    }
  }
  if (k < n) {
    for (int i = 0; i < Rows; ++i) {
      const auto row = L::load_part(s + i * s_stride + k, n - k);
      for (int j = 0; j < Columns; ++j) acc[i][j] = mul_add(row, L::load_part(x[j] + k, n - k), acc[i][j]);
    }
  }
  for (int i = 0; i < Rows; ++i) {
    for (int j = 0; j < Columns; ++j) z[j * z_stride + i] = L::sum(acc[i][j]);
  }
}

template <class Real>
inline Real dot(const Real* a, const Real* b, std::int64_t n) {
  Real result(0);
  dots_block<Real, 1, 1>(a, 0, &b, n, &result, 0);
  return result;
}

/// z[j, i] = s_i . x_j: s `[rows, n]` with row stride n, x `columns` pointers to n scalars, z `[columns, rows]`.
template <class Real>
void dots(const Real* s, std::int64_t rows, std::int64_t n, const Real* const* x, std::int64_t columns, Real* z) {
  std::int64_t j = 0;
  for (; j + 4 <= columns; j += 4) {
    std::int64_t i = 0;
    for (; i + 2 <= rows; i += 2) dots_block<Real, 2, 4>(s + i * n, n, x + j, n, z + j * rows + i, rows);
    for (; i < rows; ++i) dots_block<Real, 1, 4>(s + i * n, n, x + j, n, z + j * rows + i, rows);
  }
  for (; j < columns; ++j) {
    std::int64_t i = 0;
    for (; i + 8 <= rows; i += 8) dots_block<Real, 8, 1>(s + i * n, n, x + j, n, z + j * rows + i, rows);
    for (; i < rows; ++i) dots_block<Real, 1, 1>(s + i * n, n, x + j, n, z + j * rows + i, rows);
  }
}

/// body(load, store, valid) over n scalars, a vector at a time, the last one partial: valid(v) is v without what lies
/// beyond the n scalars, where an infinite factor has made NaN of 0.
template <class Real, class Body>
inline void for_lanes(std::int64_t n, Body&& body) {
  using L = Lanes<Real>;
  using Vector = typename L::Vector;
  std::int64_t k = 0;
  for (; k + L::width <= n; k += L::width) {
    body([k](const Real* p) { return L::load(p + k); }, [k](Real* p, const Vector& v) { L::store(p + k, v); },
         [](const Vector& v) { return v; });
  }
  if (k < n) {
    body([k, n](const Real* p) { return L::load_part(p + k, n - k); },
         [k, n](Real* p, const Vector& v) { L::store_part(p + k, n - k, v); },
         [k, n](const Vector& v) { return L::first(v, n - k); });
  }
}

/// out = a z + sum_j b_j x_j over n scalars, x [count, n], added in the order of j.
template <class Real>
void add_products(const Real* z, const Real& a, const Real* b, const Real* x, std::int64_t count, std::int64_t n,
                  Real* out) {
  using L = Lanes<Real>;
  for_lanes<Real>(n, [&](auto load, auto store, auto) {
    typename L::Vector sum = L::splat(a) * load(z);
    for (std::int64_t j = 0; j < count; ++j) sum = mul_add(L::splat(b[j]), load(x + j * n), sum);
    store(out, sum);
  });
}

/// y += a x over n scalars.
template <class Real>
void add_scaled(Real* y, const Real& a, const Real* x, std::int64_t n) {
  add_products(y, Real(1), &a, x, 1, n, y);
}

/// S <- S decay + u w^T on `rows` rows of n columns, then y = S c from the new state. u is given.
/// `decay` is e^log_decay: one scalar, or n of them where ColumnDecay.
template <bool ColumnDecay, class Real>
void update_and_read(Real* s, std::int64_t rows, std::int64_t n, const Real* decay, const Real* u, const Real* w,
                     const Real* c, Real* y) {
  using L = Lanes<Real>;
  const auto block = [&]<int R>(std::int64_t first) {
    typename L::Vector acc[R], factor[R];
    for (int r = 0; r < R; ++r) {
      acc[r] = L::splat(Real(0));
      factor[r] = L::splat(u[first + r]);
    }
    const auto scalar_decay = L::splat(decay[0]);
    for_lanes<Real>(n, [&, base = s + first * n](auto load, auto store, auto valid) {
      const auto wk = load(w), ck = load(c);
      const auto a = ColumnDecay ? load(decay) : scalar_decay;
      for (int r = 0; r < R; ++r) {
        const typename L::Vector next = mul_add(factor[r], wk, typename L::Vector(a * load(base + r * n)));
        store(base + r * n, next);
        acc[r] = mul_add(valid(next), ck, acc[r]);
      }
    });
    for (int r = 0; r < R; ++r) y[first + r] = L::sum(acc[r]);
  };
  std::int64_t i = 0;
  for (; i + 4 <= rows; i += 4) block.template operator()<4>(i);
  for (; i < rows; ++i) block.template operator()<1>(i);
}

}  // namespace replayssm
