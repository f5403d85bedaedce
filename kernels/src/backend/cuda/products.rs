//! Products by cuBLASLt: sums in f32, the bias in the epilogue, its choice of algorithm kept by shape.

use std::{collections::HashMap, ffi::c_void, ptr::null_mut};

use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute,
    cublasLtMatrixLayout_t, cublasStatus_t, cudaDataType,
};

use super::driver::{Failed, Result, Stream};
use crate::{DType, cuda::Product};

/// What cuBLASLt may use beside the operands, a stream: as much as its fastest algorithms on Hopper ask for.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// Calls a function of cuBLASLt, and names it if it fails.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        check(stringify!($function), sys::$function($($argument),*))
    };
}

fn check(call: &'static str, status: cublasStatus_t) -> Result<()> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        _ => Err(Failed { call, error: format!("{status:?} ({})", status as u32) }),
    }
}

/// cuBLASLt, and what it said of each shape. One thread at a time.
pub(super) struct Products {
    handle: cublasLtHandle_t,
    /// `None` where it has no algorithm.
    prepared: HashMap<Key, Option<Prepared>>,
}

// SAFETY: handles and descriptions are used by one thread at a time, which the owner's lock sees to.
unsafe impl Send for Products {}

/// Everything that the choice of an algorithm depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    m: usize,
    n: usize,
    k: usize,
    a_transposed: bool,
    b_transposed: bool,
    input: DType,
    out: DType,
    bias: bool,
    accumulate: bool,
    /// Of a, b and out, in bytes: powers of two.
    alignments: [u32; 3],
}

/// A product that can be run.
struct Prepared {
    description: Description,
    layouts: [Layout; 3],
    algorithm: cublasLtMatmulAlgo_t,
}

impl Products {
    /// # Errors
    /// What cuBLASLt says. Only where [`is_present`].
    pub(super) fn new() -> Result<Self> {
        let mut handle = null_mut();
        // SAFETY: a handle is written.
        unsafe { call!(cublasLtCreate(&mut handle)) }?;
        Ok(Products { handle, prepared: HashMap::new() })
    }

    /// Queues a product; `false` if cuBLASLt has no algorithm for it, and nothing was queued.
    ///
    /// # Safety
    /// The operands are device memory, and the workspace is [`WORKSPACE_BYTES`] that only this stream uses.
    pub(super) unsafe fn run(&mut self, product: &Product, stream: &Stream, workspace: u64) -> Result<bool> {
        let key = Key::of(product);
        if !self.prepared.contains_key(&key) {
            let prepared = Prepared::new(self.handle, &key)?;
            self.prepared.insert(key, prepared);
        }
        let Some(Some(prepared)) = self.prepared.get(&key) else { return Ok(false) };
        if key.bias {
            prepared.description.set(DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &product.bias)?;
        }
        let (alpha, beta) = (1.0f32, if key.accumulate { 1.0f32 } else { 0.0 });
        let pointer = |address: u64| address as *mut c_void;
        let [a, b, out] = &prepared.layouts;
        // SAFETY: the caller's contract; layouts and algorithm are those that were made for this shape. cuBLASLt's a is our b:
        // see `Prepared::new`.
        unsafe {
            call!(cublasLtMatmul(
                self.handle,
                prepared.description.0,
                (&raw const alpha).cast(),
                pointer(product.b),
                a.0,
                pointer(product.a),
                b.0,
                (&raw const beta).cast(),
                pointer(product.out),
                out.0,
                pointer(product.out),
                out.0,
                &prepared.algorithm,
                pointer(workspace),
                WORKSPACE_BYTES,
                stream.raw().cast(),
            ))
        }?;
        Ok(true)
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.prepared.clear();
        // SAFETY: created once, destroyed once.
        let _ = unsafe { call!(cublasLtDestroy(self.handle)) };
    }
}

/// Whether the library is there.
pub(super) fn is_present() -> bool {
    // SAFETY: loading it runs its initialisers, as any program that uses it does.
    unsafe { sys::is_culib_present() }
}

impl Key {
    fn of(product: &Product) -> Self {
        // 256 is what an allocation has, and the most that an algorithm asks for.
        let alignment = |address: u64| 1 << address.trailing_zeros().min(8);
        Key {
            m: product.m,
            n: product.n,
            k: product.k,
            a_transposed: product.a_transposed,
            b_transposed: product.b_transposed,
            input: product.input_dtype,
            out: product.out_dtype,
            bias: product.bias != 0,
            accumulate: product.accumulate,
            alignments: [product.a, product.b, product.out].map(alignment),
        }
    }
}

impl Prepared {
    /// cuBLASLt's matrices lie column by column, ours row by row: it is given the product of the transposed ones,
    /// outᵀ = bᵀ · aᵀ, which are the same bytes read its way. The bias, one a row there, is one a column here.
    fn new(handle: cublasLtHandle_t, key: &Key) -> Result<Option<Self>> {
        let Key { m, n, k, .. } = *key;
        let description = Description::new()?;
        // Of the library's operations 0 takes a matrix as it is and 1 transposes it.
        let operation = i32::from;
        description.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(key.b_transposed))?;
        description.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(key.a_transposed))?;
        if key.bias {
            let epilogue = cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            description.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        }
        let stored = |rows, columns, transposed| if transposed { (columns, rows) } else { (rows, columns) };
        let (a, b) = (stored(n, k, key.b_transposed), stored(k, m, key.a_transposed));
        let layouts = [
            Layout::new(key.input, a.0, a.1)?,
            Layout::new(key.input, b.0, b.1)?,
            Layout::new(key.out, n, m)?,
        ];
        let preference = Preference::new()?;
        preference.set(PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE_BYTES)?;
        let [of_a, of_b, of_out] = key.alignments;
        for (attribute, alignment) in [
            (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, of_b),
            (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, of_a),
            (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, of_out),
            (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, of_out),
        ] {
            preference.set(attribute, &alignment)?;
        }
        let algorithm = choose(handle, &description, &layouts, &preference)?;
        Ok(algorithm.map(|algorithm| Prepared { description, layouts, algorithm }))
    }
}

/// The algorithm that cuBLASLt thinks fastest; the same for the same shape on the same card.
fn choose(
    handle: cublasLtHandle_t,
    description: &Description,
    [a, b, out]: &[Layout; 3],
    preference: &Preference,
) -> Result<Option<cublasLtMatmulAlgo_t>> {
    // SAFETY: plain data, for which all zeros is a value: a status of 0 is success, and what counts is how many are found.
    let mut found: cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
    let mut count = 0;
    // SAFETY: all handles are there; one result and a count are written.
    let status = unsafe {
        sys::cublasLtMatmulAlgoGetHeuristic(
            handle,
            description.0,
            a.0,
            b.0,
            out.0,
            out.0,
            preference.0,
            1,
            &mut found,
            &mut count,
        )
    };
    match status {
        cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => Ok(None),
        status => {
            check("cublasLtMatmulAlgoGetHeuristic", status)?;
            let usable = count > 0 && found.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS;
            Ok(usable.then_some(found.algo))
        }
    }
}

struct Description(cublasLtMatmulDesc_t);

impl Description {
    fn new() -> Result<Self> {
        let mut description = null_mut();
        let (compute, scale) = (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F);
        // SAFETY: a handle is written.
        unsafe { call!(cublasLtMatmulDescCreate(&mut description, compute, scale)) }?;
        Ok(Description(description))
    }

    fn set<T: Copy>(&self, attribute: DescAttribute, value: &T) -> Result<()> {
        let value: *const T = value;
        // SAFETY: the value is read before the call returns, and its size is given.
        unsafe { call!(cublasLtMatmulDescSetAttribute(self.0, attribute, value.cast(), size_of::<T>())) }
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { call!(cublasLtMatmulDescDestroy(self.0)) };
    }
}

/// A matrix whose columns follow one another.
struct Layout(cublasLtMatrixLayout_t);

impl Layout {
    fn new(dtype: DType, rows: usize, columns: usize) -> Result<Self> {
        let dtype = match dtype {
            DType::F16 => cudaDataType::CUDA_R_16F,
            DType::BF16 => cudaDataType::CUDA_R_16BF,
            _ => cudaDataType::CUDA_R_32F,
        };
        let mut layout = null_mut();
        // SAFETY: a handle is written.
        unsafe {
            call!(cublasLtMatrixLayoutCreate(&mut layout, dtype, rows as u64, columns as u64, rows as i64))
        }?;
        Ok(Layout(layout))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { call!(cublasLtMatrixLayoutDestroy(self.0)) };
    }
}

struct Preference(cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self> {
        let mut preference = null_mut();
        // SAFETY: a handle is written.
        unsafe { call!(cublasLtMatmulPreferenceCreate(&mut preference)) }?;
        Ok(Preference(preference))
    }

    fn set<T: Copy>(&self, attribute: PreferenceAttribute, value: &T) -> Result<()> {
        let value: *const T = value;
        // SAFETY: the value is read before the call returns, and its size is given.
        unsafe {
            call!(cublasLtMatmulPreferenceSetAttribute(self.0, attribute, value.cast(), size_of::<T>()))
        }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { call!(cublasLtMatmulPreferenceDestroy(self.0)) };
    }
}
