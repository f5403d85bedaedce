//! The driver's calls, as CUDA's header has them. Who calls them keeps that header's rules; what can be checked is.
#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUevent_flags, CUfunction, CUmodule,
    CUresult, CUstream,
};
use ebbtide_simgpu::Product;

use crate::driver::{DRIVER, Device, State, call, code_of, current, lock, name, result, set_current};

const OK: CUresult = CUresult::CUDA_SUCCESS;
const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// A device's number and that of one of its things, as the pointer that the caller has.
fn pointer<T>(device: &Device, id: usize) -> *mut T {
    ((device.ordinal + 1) << 32 | id) as *mut T
}

/// The thing's number, if it is of this device.
fn id<T>(device: &Device, pointer: *mut T) -> Result<usize, CUresult> {
    let value = pointer as usize;
    let foreign = value >> 32 != device.ordinal + 1;
    if foreign { Err(CUresult::CUDA_ERROR_INVALID_HANDLE) } else { Ok(value & u32::MAX as usize) }
}

/// A call on a thing of this thread's device.
fn on<T>(
    call: &'static str,
    thing: *mut T,
    run: impl FnOnce(&mut State, usize) -> Result<(), CUresult>,
) -> CUresult {
    result(current().and_then(|device| {
        let id = id(&device, thing)?;
        device.call(call, |state| run(state, id))
    }))
}

/// # Safety
/// `to` is null, or a place for a value.
unsafe fn put<T>(to: *mut T, value: T) -> Result<(), CUresult> {
    if to.is_null() {
        return Err(INVALID);
    }
    // SAFETY: the caller's contract.
    unsafe { to.write(value) };
    Ok(())
}

/// Makes something new and gives its handle.
///
/// # Safety
/// `to` is null, or a place for a handle.
unsafe fn give<T>(
    name: &'static str,
    to: *mut *mut T,
    make: impl FnOnce(&mut State) -> Result<usize, CUresult>,
) -> CUresult {
    result(current().and_then(|device| {
        device.call(name, |state| {
            let made = make(state)?;
            // SAFETY: the caller's contract.
            unsafe { put(to, pointer(&device, made)) }
        })
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> CUresult {
    if flags == 0 { OK } else { INVALID }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CUresult {
    // SAFETY: the caller's contract.
    result(unsafe { put(version, lock(&DRIVER.card).driver) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CUresult {
    // SAFETY: the caller's contract.
    result(unsafe { put(count, lock(&DRIVER.card).devices as c_int) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> CUresult {
    if usize::try_from(ordinal).is_ok_and(|ordinal| ordinal < lock(&DRIVER.card).devices) {
        // SAFETY: the caller's contract.
        return result(unsafe { put(device, ordinal) });
    }
    CUresult::CUDA_ERROR_INVALID_DEVICE
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(to: *mut c_char, len: c_int, _device: CUdevice) -> CUresult {
    let name = c"Simulated GPU";
    if to.is_null() || (len.max(0) as usize) < name.count_bytes() + 1 {
        return INVALID;
    }
    // SAFETY: there is room, as the caller says.
    unsafe { to.copy_from_nonoverlapping(name.as_ptr(), name.count_bytes() + 1) };
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: CUdevice) -> CUresult {
    // SAFETY: the caller's contract.
    result(unsafe { put(bytes, lock(&DRIVER.card).memory_bytes) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: CUdevice_attribute,
    _device: CUdevice,
) -> CUresult {
    let card = lock(&DRIVER.card).clone();
    let known = match attribute {
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => card.major,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => card.minor,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 132,
        _ => return INVALID,
    };
    // SAFETY: the caller's contract.
    result(unsafe { put(value, known) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> CUresult {
    let device = DRIVER.device(device as usize);
    result(device.call("cuDevicePrimaryCtxRetain", |state| {
        state.retained += 1;
        // SAFETY: the caller's contract.
        unsafe { put(context, pointer(&device, 0)) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> CUresult {
    let device = DRIVER.device(device as usize);
    let mut state = device.state();
    if state.retained == 0 {
        return CUresult::CUDA_ERROR_INVALID_CONTEXT;
    }
    state.retained -= 1;
    if state.retained == 0 {
        let memory_bytes = lock(&DRIVER.card).memory_bytes;
        state.close(memory_bytes);
    }
    OK
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    set_current((!context.is_null()).then(|| DRIVER.device(((context as usize) >> 32) - 1)));
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    call("cuMemGetInfo_v2", |state| {
        // SAFETY: the caller's contract.
        unsafe {
            put(free, state.world.free_bytes())?;
            put(total, lock(&DRIVER.card).memory_bytes)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(start: *mut CUdeviceptr, bytes: usize) -> CUresult {
    call("cuMemAlloc_v2", |state| {
        let made = state.world.alloc(bytes).map_err(code_of)?;
        // SAFETY: the caller's contract.
        unsafe { put(start, made) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(start: CUdeviceptr) -> CUresult {
    call("cuMemFree_v2", |state| state.world.free(start).map_err(code_of))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, _flags: c_uint) -> CUresult {
    call("cuMemHostAlloc", |state| {
        let made = state.world.pin(bytes).map_err(code_of)?;
        // SAFETY: the caller's contract.
        unsafe { put(start, made.cast()) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(start: *mut c_void) -> CUresult {
    call("cuMemFreeHost", |state| state.world.unpin(start as u64, true).map_err(code_of))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(start: *mut c_void, bytes: usize, _flags: c_uint) -> CUresult {
    call("cuMemHostRegister_v2", |state| state.world.register(start as u64, bytes).map_err(code_of))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(start: *mut c_void) -> CUresult {
    call("cuMemHostUnregister", |state| state.world.unpin(start as u64, false).map_err(code_of))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut CUstream, _flags: c_uint) -> CUresult {
    // SAFETY: the caller's contract.
    unsafe { give("cuStreamCreate", stream, |state| Ok(state.world.stream())) }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    on("cuStreamDestroy_v2", stream, |state, stream| state.world.end_stream(stream).map_err(code_of))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: CUstream) -> CUresult {
    result(current().and_then(|device| {
        let stream = id(&device, stream)?;
        device.wait("cuStreamSynchronize", |state| state.world.waiting_for_stream(stream))
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) -> CUresult {
    result(current().and_then(|device| {
        let (stream, event) = (id(&device, stream)?, id(&device, event)?);
        device.call("cuStreamWaitEvent", |state| state.world.wait_event(stream, event).map_err(code_of))
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitValue32_v2(
    stream: CUstream,
    word: CUdeviceptr,
    value: u32,
    flags: c_uint,
) -> CUresult {
    // At least the value, as a signed difference: the only condition that is played.
    if flags != 0 {
        return CUresult::CUDA_ERROR_NOT_SUPPORTED;
    }
    on("cuStreamWaitValue32_v2", stream, |state, stream| {
        state.world.wait_word(stream, word, value).map_err(code_of)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    on("cuMemcpyDtoHAsync_v2", stream, |state, stream| {
        state.world.copy(stream, to as u64, from, bytes).map_err(code_of)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    on("cuMemcpyHtoDAsync_v2", stream, |state, stream| {
        state.world.copy(stream, to, from as u64, bytes).map_err(code_of)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    on("cuMemcpyDtoDAsync_v2", stream, |state, stream| {
        state.world.copy(stream, to, from, bytes).map_err(code_of)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(at: CUdeviceptr, value: u8, bytes: usize, stream: CUstream) -> CUresult {
    on("cuMemsetD8Async", stream, |state, stream| state.world.set(stream, at, value, bytes).map_err(code_of))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> CUresult {
    // SAFETY: the caller's contract; only PTX is loaded, which ends with a zero.
    let code = match unsafe { CStr::from_ptr(image.cast()) }.to_str().map(|ptx| DRIVER.code(ptx)) {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => return error,
        Err(_) => return CUresult::CUDA_ERROR_INVALID_IMAGE,
    };
    // SAFETY: the caller's contract.
    unsafe { give("cuModuleLoadData", module, |state| Ok(state.world.module(code))) }
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: CUmodule) -> CUresult {
    on("cuModuleUnload", module, |state, module| state.world.unload(module).map_err(code_of))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: *mut CUfunction,
    module: CUmodule,
    name: *const c_char,
) -> CUresult {
    // SAFETY: the caller's contract.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let module = current().and_then(|device| id(&device, module));
    let find = |state: &mut State| {
        let module = module?;
        let code = state.world.code(module).map_err(code_of)?;
        let parameters = code.parameters(&name).map_err(|_| CUresult::CUDA_ERROR_NOT_FOUND)?;
        state.kernels.push((module, name, parameters));
        Ok(state.kernels.len() - 1)
    };
    // SAFETY: the caller's contract.
    unsafe { give("cuModuleGetFunction", function, find) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: CUfunction,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: CUstream,
    arguments: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> CUresult {
    result(current().and_then(|device| {
        let (function, stream) = (id(&device, function)?, id(&device, stream)?);
        device.call("cuLaunchKernel", |state| {
            let (module, name, parameters) =
                state.kernels.get(function).cloned().ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
            let argument = |(at, &bytes): (usize, &usize)| {
                // SAFETY: the caller gives an address a parameter, of as many bytes.
                unsafe { std::slice::from_raw_parts((*arguments.add(at)).cast::<u8>(), bytes) }.to_vec()
            };
            let arguments = parameters.iter().enumerate().map(argument).collect();
            let shape = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
            let launched =
                state.world.launch(stream, (module, &name), shape, shared_bytes as usize, arguments);
            launched.map_err(code_of)
        })
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> CUresult {
    let timed = flags & CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 == 0;
    // SAFETY: the caller's contract.
    unsafe { give("cuEventCreate", event, |state| Ok(state.world.event(timed))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: CUevent, end: CUevent) -> CUresult {
    result(current().and_then(|device| {
        let (start, end) = (id(&device, start)?, id(&device, end)?);
        device.call("cuEventElapsedTime_v2", |state| {
            let nanos = state.world.elapsed(start, end).map_err(code_of)?;
            let nanos = nanos.ok_or(CUresult::CUDA_ERROR_NOT_READY)?;
            // SAFETY: the caller's contract.
            unsafe { put(milliseconds, nanos as f32 / 1e6) }
        })
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    on("cuEventDestroy_v2", event, |state, event| state.world.end_event(event).map_err(code_of))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult {
    result(current().and_then(|device| {
        let (event, stream) = (id(&device, event)?, id(&device, stream)?);
        device.call("cuEventRecord", |state| state.world.record(event, stream).map_err(code_of))
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: CUevent) -> CUresult {
    on("cuEventQuery", event, |state, event| match state.world.query(event).map_err(code_of)? {
        true => Ok(()),
        false => Err(CUresult::CUDA_ERROR_NOT_READY),
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: CUevent) -> CUresult {
    result(current().and_then(|device| {
        let event = id(&device, event)?;
        device.wait("cuEventSynchronize", |state| state.world.waiting_for_event(event))
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(error: CUresult, text: *mut *const c_char) -> CUresult {
    // SAFETY: the caller's contract.
    result(unsafe { put(text, name(error).as_ptr()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(_error: CUresult, text: *mut *const c_char) -> CUresult {
    // SAFETY: the caller's contract.
    result(unsafe { put(text, c"played by a simulated driver".as_ptr()) })
}

/// For the simulated library of products: queues one.
///
/// # Safety
/// A product whose matrices are the caller's.
#[unsafe(no_mangle)]
unsafe extern "C" fn ebbtide_sim_product(stream: *mut c_void, product: *const Product) -> CUresult {
    // SAFETY: the caller's contract.
    let product = unsafe { *product };
    on("cublasLtMatmul", stream, |state, stream| state.world.product(stream, product).map_err(code_of))
}
