//! A `libcublasLt.so` without a GPU: what the backend asks of it, with the products queued on the simulated driver.
//!
//! It has an algorithm for every shape whose rows begin at multiples of 4 bytes; for others it says that it has none, as
//! CUDA's may.
#![allow(non_snake_case)]

use std::{
    ffi::{c_int, c_void},
    sync::OnceLock,
};

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulDescAttributes_t as DescAttribute,
    cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute,
    cublasStatus_t, cudaDataType,
};
use ebbtide_simgpu::{Matrix, Number, Product};
use libloading::Library;

const OK: cublasStatus_t = cublasStatus_t::CUBLAS_STATUS_SUCCESS;
const INVALID: cublasStatus_t = cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE;
/// What rows begin at a multiple of, in bytes.
const ALIGNMENT: usize = 4;

/// What a product does beside multiplying.
#[derive(Default)]
struct Description {
    a_transposed: bool,
    b_transposed: bool,
    epilogue: u32,
    bias: u64,
}

/// How a matrix lies.
struct Layout {
    number: Number,
    rows: usize,
    columns: usize,
    stride: usize,
}

impl Layout {
    fn at(&self, start: *const c_void) -> Matrix {
        let Layout { number, rows, columns, stride } = *self;
        Matrix { start: start as u64, rows, columns, stride, number }
    }

    fn is_aligned(&self) -> bool {
        (self.stride * self.number.bytes()).is_multiple_of(ALIGNMENT)
    }
}

/// Gives something to the caller.
///
/// # Safety
/// `to` is a place for a pointer.
unsafe fn give<T>(to: *mut *mut T, value: T) -> cublasStatus_t {
    // SAFETY: the caller's contract.
    unsafe { to.write(Box::into_raw(Box::new(value))) };
    OK
}

/// Takes back what was given.
///
/// # Safety
/// It was, and is used no more.
unsafe fn take<T>(given: *mut T) -> cublasStatus_t {
    // SAFETY: the caller's contract.
    drop(unsafe { Box::from_raw(given) });
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtCreate(handle: *mut *mut u8) -> cublasStatus_t {
    // SAFETY: the caller's contract.
    unsafe { give(handle, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtDestroy(handle: *mut u8) -> cublasStatus_t {
    // SAFETY: the caller's contract.
    unsafe { take(handle) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescCreate(
    description: *mut *mut Description,
    compute: cublasComputeType_t,
    scale: cudaDataType,
) -> cublasStatus_t {
    if compute != cublasComputeType_t::CUBLAS_COMPUTE_32F || scale != cudaDataType::CUDA_R_32F {
        return cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED;
    }
    // SAFETY: the caller's contract.
    unsafe { give(description, Description::default()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescDestroy(description: *mut Description) -> cublasStatus_t {
    // SAFETY: the caller's contract.
    unsafe { take(description) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    description: *mut Description,
    attribute: DescAttribute,
    value: *const c_void,
    bytes: usize,
) -> cublasStatus_t {
    // SAFETY: the caller's contract: a description, and a value of that many bytes.
    let (description, word) = unsafe {
        let word = match bytes {
            4 => u64::from(value.cast::<u32>().read_unaligned()),
            8 => value.cast::<u64>().read_unaligned(),
            _ => return INVALID,
        };
        (&mut *description, word)
    };
    match (attribute, bytes) {
        (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, 4) => description.a_transposed = word != 0,
        (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, 4) => description.b_transposed = word != 0,
        (DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, 4) => description.epilogue = word as u32,
        (DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, 8) => description.bias = word,
        _ => return INVALID,
    }
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    layout: *mut *mut Layout,
    number: cudaDataType,
    rows: u64,
    columns: u64,
    stride: i64,
) -> cublasStatus_t {
    let number = match number {
        cudaDataType::CUDA_R_32F => Number::F32,
        cudaDataType::CUDA_R_16F => Number::F16,
        cudaDataType::CUDA_R_16BF => Number::BF16,
        _ => return cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
    };
    if rows == 0 || columns == 0 || stride < rows as i64 {
        return INVALID;
    }
    let (rows, columns, stride) = (rows as usize, columns as usize, stride as usize);
    // SAFETY: the caller's contract.
    unsafe { give(layout, Layout { number, rows, columns, stride }) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatrixLayoutDestroy(layout: *mut Layout) -> cublasStatus_t {
    // SAFETY: the caller's contract.
    unsafe { take(layout) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulPreferenceCreate(preference: *mut *mut u8) -> cublasStatus_t {
    // SAFETY: the caller's contract.
    unsafe { give(preference, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulPreferenceDestroy(preference: *mut u8) -> cublasStatus_t {
    // SAFETY: the caller's contract.
    unsafe { take(preference) }
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    _preference: *mut u8,
    attribute: PreferenceAttribute,
    _value: *const c_void,
    bytes: usize,
) -> cublasStatus_t {
    let expected = match attribute {
        PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES => 8,
        _ => 4,
    };
    if bytes == expected { OK } else { INVALID }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: *mut u8,
    _description: *const Description,
    a: *const Layout,
    b: *const Layout,
    c: *const Layout,
    out: *const Layout,
    _preference: *const u8,
    asked: c_int,
    found: *mut cublasLtMatmulHeuristicResult_t,
    count: *mut c_int,
) -> cublasStatus_t {
    // SAFETY: the caller's contract: layouts, and places for as many results as asked for and for a number.
    unsafe {
        if asked < 1 || ![a, b, c, out].iter().all(|layout| (**layout).is_aligned()) {
            count.write(0);
            return cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED;
        }
        (*found).state = OK;
        count.write(1);
    }
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmul(
    _handle: *mut u8,
    description: *const Description,
    alpha: *const f32,
    a: *const c_void,
    a_layout: *const Layout,
    b: *const c_void,
    b_layout: *const Layout,
    beta: *const f32,
    c: *const c_void,
    c_layout: *const Layout,
    out: *mut c_void,
    out_layout: *const Layout,
    _algorithm: *const c_void,
    workspace: *mut c_void,
    workspace_bytes: usize,
    stream: *mut c_void,
) -> cublasStatus_t {
    // SAFETY: the caller's contract: descriptions that were made, and factors on the host.
    let (description, product) = unsafe {
        let description = &*description;
        let product = Product {
            a: (*a_layout).at(a),
            b: (*b_layout).at(b),
            c: (*c_layout).at(c),
            out: (*out_layout).at(out),
            a_transposed: description.a_transposed,
            b_transposed: description.b_transposed,
            alpha: *alpha,
            beta: *beta,
            bias: description.bias,
            workspace: workspace as u64,
            workspace_bytes,
        };
        (description, product)
    };
    let shape = |matrix: &Matrix, transposed| match transposed {
        true => (matrix.columns, matrix.rows),
        false => (matrix.rows, matrix.columns),
    };
    let (a, b) = (shape(&product.a, product.a_transposed), shape(&product.b, product.b_transposed));
    let biased = description.epilogue == cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
    let plain = description.epilogue == 0
        || description.epilogue == cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT as u32;
    let fits = a.1 == b.0 && (a.0, b.1) == (product.out.rows, product.out.columns);
    if !fits || !(biased || plain) || biased != (product.bias != 0) {
        return INVALID;
    }
    type Queue = unsafe extern "C" fn(*mut c_void, *const Product) -> u32;
    static DRIVER: OnceLock<Library> = OnceLock::new();
    // SAFETY: the driver is loaded, since there is a stream; by this name the loader gives the same again.
    let load = || unsafe { Library::new("libcuda.so") }.expect("a driver that is loaded");
    // SAFETY: the driver's function under its type, and a product of the caller's matrices.
    let status = unsafe {
        let queue =
            DRIVER.get_or_init(load).get::<Queue>("ebbtide_sim_product").expect("the simulated driver");
        queue(stream, &product)
    };
    if status == 0 { OK } else { cublasStatus_t::CUBLAS_STATUS_EXECUTION_FAILED }
}
