//! The driver's calls, as far as they are used: handles that free themselves, and failures that say which call it was.
//!
//! Nothing here decides an order; it says what CUDA is asked, and keeps the rules of who may be asked what when.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    ptr::{NonNull, null_mut},
    sync::Arc,
};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUevent_flags, CUfunction, CUmodule,
    CUresult, CUstream, CUstream_flags, CUstreamWaitValue_flags,
};

use crate::{CudaUnavailable, Error};

/// The oldest driver that loads the kernels' PTX (its version is 9.0), as 1000 · major + 10 · minor.
const DRIVER: usize = 13_000;
/// The oldest card with everything that the kernels use.
const CAPABILITY: (i32, i32) = (8, 0);

/// A call that failed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Failed {
    pub(super) call: &'static str,
    pub(super) error: String,
}

impl Failed {
    /// As the device layer's error.
    pub(super) fn doing(self, doing: impl Into<String>) -> Error {
        Error::Driver { doing: doing.into(), call: self.call, error: self.error }
    }
}

pub(super) type Result<T, E = Failed> = std::result::Result<T, E>;

/// Calls a function of the driver, and names it if it fails.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        check(stringify!($function), sys::$function($($argument),*))
    };
}

fn check(call: &'static str, code: CUresult) -> Result<()> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        _ => Err(Failed { call, error: describe(code) }),
    }
}

/// The driver's name and sentence for an error. Only where there is a driver.
fn describe(code: CUresult) -> String {
    let mut texts = [std::ptr::null::<c_char>(); 2];
    let [name, sentence] = &mut texts;
    // SAFETY: a code of the driver's own goes in, the address of a static string or nothing comes out.
    let found = unsafe { [sys::cuGetErrorName(code, name), sys::cuGetErrorString(code, sentence)] };
    let text = |(text, found): (*const c_char, CUresult)| match found {
        // SAFETY: the driver gave a string that ends with a zero and is never freed.
        CUresult::CUDA_SUCCESS if !text.is_null() => unsafe { CStr::from_ptr(text) }.to_string_lossy(),
        _ => "unknown".into(),
    };
    let [name, sentence] = [(texts[0], found[0]), (texts[1], found[1])].map(text);
    format!("{name} ({}): {sentence}", code as u32)
}

/// A device's primary context, shared with whoever else uses CUDA in this process.
pub(super) struct Context {
    device: CUdevice,
    context: CUcontext,
    /// The card's name.
    pub(super) name: String,
    /// Bytes of the card.
    pub(super) total_bytes: usize,
}

// SAFETY: contexts may be used by any thread that has made them current, which `bind` does.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens a device, after all that could be wrong has been looked at: no function of a driver that is missing or too old is
    /// called.
    pub(super) fn open(ordinal: usize) -> Result<Arc<Self>, Error> {
        let unavailable = |reason| Error::Cuda { ordinal, reason };
        let start = |failed: Failed| unavailable(CudaUnavailable::Start { error: failed.error });
        // SAFETY: loading the driver runs its initialisers, as any program that uses CUDA does.
        if !unsafe { sys::is_culib_present() } {
            return Err(unavailable(CudaUnavailable::NoDriver));
        }
        let (mut version, mut count): (c_int, c_int) = (0, 0);
        // SAFETY: the driver is there, and each call writes one number.
        unsafe {
            call!(cuDriverGetVersion(&mut version)).map_err(start)?;
            let found = version.max(0) as usize;
            if found < DRIVER {
                return Err(unavailable(CudaUnavailable::OldDriver { found, needed: DRIVER }));
            }
            call!(cuInit(0)).map_err(start)?;
            call!(cuDeviceGetCount(&mut count)).map_err(start)?;
        }
        let count = count.max(0) as usize;
        if ordinal >= count {
            return Err(unavailable(CudaUnavailable::NoDevice { count }));
        }
        let opened = Self::retain(ordinal).map_err(start)?;
        let capability = (
            opened
                .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
                .map_err(start)?,
            opened
                .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
                .map_err(start)?,
        );
        if capability < CAPABILITY {
            let mut missing = vec!["bfloat16 arithmetic", "asynchronous copies to shared memory"];
            missing.extend((capability < (7, 5)).then_some("the instruction set that CUDA 13 compiles for"));
            let name = opened.name.clone();
            return Err(unavailable(CudaUnavailable::OldCard { name, capability, missing }));
        }
        Ok(Arc::new(opened))
    }

    fn retain(ordinal: usize) -> Result<Self> {
        let (mut device, mut context, mut total_bytes) = (0, null_mut(), 0);
        let mut name = [0 as c_char; 256];
        // SAFETY: the driver is initialised and has this device; each call writes what it is given the address of.
        unsafe {
            call!(cuDeviceGet(&mut device, ordinal as c_int))?;
            call!(cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device))?;
            call!(cuDeviceTotalMem_v2(&mut total_bytes, device))?;
            call!(cuDevicePrimaryCtxRetain(&mut context, device))?;
        }
        // SAFETY: the driver ends the name with a zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        Ok(Context { device, context, name, total_bytes })
    }

    fn attribute(&self, attribute: CUdevice_attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: the device is there; one number is written.
        unsafe { call!(cuDeviceGetAttribute(&mut value, attribute, self.device)) }?;
        Ok(value)
    }

    /// Makes the context this thread's. Whoever calls the driver does this first: another user of CUDA may have made its own
    /// current.
    pub(super) fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { call!(cuCtxSetCurrent(self.context)) }
    }

    /// Bytes that the driver could still give.
    pub(super) fn free_bytes(&self) -> Result<usize> {
        let (mut free, mut total) = (0, 0);
        self.bind()?;
        // SAFETY: a context is current; two numbers are written.
        unsafe { call!(cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok(free)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, released once. What fails here has no one left to be told.
        let _ = unsafe { call!(cuDevicePrimaryCtxRelease_v2(self.device)) };
    }
}

/// Device memory.
pub(super) struct DeviceMemory {
    context: Arc<Context>,
    pub(super) start: CUdeviceptr,
}

impl DeviceMemory {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let mut start = 0;
        context.bind()?;
        // SAFETY: a context is current; an address is written.
        unsafe { call!(cuMemAlloc_v2(&mut start, bytes.max(1))) }?;
        Ok(DeviceMemory { context: context.clone(), start })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: allocated once, freed once; the driver waits for what still uses it.
        let _ = unsafe { call!(cuMemFree_v2(self.start)) };
    }
}

/// Pinned host memory, zeroed, at an address that the device uses too.
pub(crate) struct Pinned {
    context: Arc<Context>,
    pub(crate) start: NonNull<u8>,
}

// SAFETY: plain memory; who touches it when is for its owner to say.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let mut start: *mut c_void = null_mut();
        context.bind()?;
        // Default flags: write-combined memory is slow to read, which the host does.
        // SAFETY: a context is current; an address is written.
        unsafe { call!(cuMemHostAlloc(&mut start, bytes.max(1), 0)) }?;
        let gave_nothing = || Failed { call: "cuMemHostAlloc", error: "it gave no memory".to_string() };
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(gave_nothing)?;
        // SAFETY: memory of that length that nobody else has yet.
        unsafe { start.as_ptr().write_bytes(0, bytes) };
        Ok(Pinned { context: context.clone(), start })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: allocated once, freed once, when no queued copy uses it any more.
        let _ = unsafe { call!(cuMemFreeHost(self.start.as_ptr().cast())) };
    }
}

/// Host memory of someone else's that is pinned while this lives.
pub(super) struct Registered {
    context: Arc<Context>,
    start: *mut u8,
}

// SAFETY: it is only an address to unregister.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// # Safety
    /// The memory outlives the result.
    pub(super) unsafe fn new(context: &Arc<Context>, start: *mut u8, bytes: usize) -> Result<Self> {
        context.bind()?;
        // SAFETY: a context is current, and the caller's memory is there.
        unsafe { call!(cuMemHostRegister_v2(start.cast(), bytes, 0)) }?;
        Ok(Registered { context: context.clone(), start })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: registered once, unregistered once.
        let _ = unsafe { call!(cuMemHostUnregister(self.start.cast())) };
    }
}

/// A queue that does not wait for the legacy default stream.
///
/// Its methods are for a thread that has bound the context.
pub(super) struct Stream {
    context: Arc<Context>,
    stream: CUstream,
}

// SAFETY: the driver takes calls on a stream from any thread.
unsafe impl Send for Stream {}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let mut stream = null_mut();
        context.bind()?;
        // SAFETY: a context is current; a handle is written.
        unsafe { call!(cuStreamCreate(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32)) }?;
        Ok(Stream { context: context.clone(), stream })
    }

    /// The handle, for a library of CUDA's.
    pub(super) fn raw(&self) -> CUstream {
        self.stream
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is there.
        unsafe { call!(cuStreamSynchronize(self.stream)) }
    }

    /// What is queued from now on comes after what the event has recorded.
    pub(super) fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: stream and event are there.
        unsafe { call!(cuStreamWaitEvent(self.stream, event.event, 0)) }
    }

    /// What is queued from now on comes after a word of pinned memory has reached a value.
    ///
    /// # Safety
    /// The word lives until then.
    pub(super) unsafe fn wait_value(&self, word: *const u32, value: u32) -> Result<()> {
        let flags = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the word is pinned, so its address is the device's too; the caller keeps it.
        unsafe { call!(cuStreamWaitValue32_v2(self.stream, word as CUdeviceptr, value, flags)) }
    }

    /// # Safety
    /// Both are memory of that length, the host's pinned, and nobody touches the host's before the copy is done.
    pub(super) unsafe fn copy_to_host(&self, to: *mut u8, from: CUdeviceptr, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { call!(cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.stream)) }
    }

    /// # Safety
    /// Both are memory of that length, the host's pinned, and nobody writes the host's before the copy is done.
    pub(super) unsafe fn copy_to_device(&self, to: CUdeviceptr, from: *const u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { call!(cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream)) }
    }

    /// # Safety
    /// Both are device memory of that length.
    pub(super) unsafe fn copy(&self, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { call!(cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream)) }
    }

    /// # Safety
    /// It is device memory of that length.
    pub(super) unsafe fn set(&self, at: CUdeviceptr, value: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { call!(cuMemsetD8Async(at, value, bytes, self.stream)) }
    }

    /// # Safety
    /// The kernel takes one argument, by value, of the layout that `argument` has; what that points to is device memory that the
    /// kernel may use.
    pub(super) unsafe fn launch(
        &self,
        kernel: Kernel,
        grid: [u32; 2],
        block: u32,
        argument: &[u8],
    ) -> Result<()> {
        // The driver copies the argument before it returns; 16 bytes is the most that a field of one is aligned to.
        let mut aligned = vec![0u128; argument.len().div_ceil(16)];
        bytemuck::cast_slice_mut(&mut aligned)[..argument.len()].copy_from_slice(argument);
        let mut arguments = [aligned.as_mut_ptr().cast::<c_void>()];
        let (x, y) = (grid[0], grid[1]);
        // SAFETY: the caller's contract.
        unsafe {
            call!(cuLaunchKernel(
                kernel.0,
                x,
                y,
                1,
                block,
                1,
                1,
                0,
                self.stream,
                arguments.as_mut_ptr(),
                null_mut()
            ))
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: created once, destroyed once; the driver finishes what is queued.
        let _ = unsafe { call!(cuStreamDestroy_v2(self.stream)) };
    }
}

/// A point in a stream. Host threads that wait for one sleep.
pub(super) struct Event {
    context: Arc<Context>,
    event: CUevent,
}

// SAFETY: the driver takes calls on an event from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; recording anew is left to its only owner.
unsafe impl Sync for Event {}

impl Event {
    /// A `timed` one also says when it was.
    pub(super) fn new(context: &Arc<Context>, timed: bool) -> Result<Self> {
        let mut event = null_mut();
        let untimed = if timed { 0 } else { CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 };
        let flags = CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 | untimed;
        context.bind()?;
        // SAFETY: a context is current; a handle is written.
        unsafe { call!(cuEventCreate(&mut event, flags)) }?;
        Ok(Event { context: context.clone(), event })
    }

    /// Stands for everything that the stream has been given so far.
    pub(super) fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both are there.
        unsafe { call!(cuEventRecord(self.event, stream.stream)) }
    }

    pub(super) fn is_done(&self) -> Result<bool> {
        // SAFETY: the event is there.
        match unsafe { sys::cuEventQuery(self.event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Seconds since an earlier one, by the device's clock. Both are timed and done.
    pub(super) fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        let mut milliseconds = 0.0;
        // SAFETY: the events are there; a number is written.
        unsafe { call!(cuEventElapsedTime_v2(&mut milliseconds, earlier.event, self.event)) }?;
        Ok(f64::from(milliseconds) / 1e3)
    }

    /// Waits on the host.
    pub(super) fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the event is there.
        unsafe { call!(cuEventSynchronize(self.event)) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: created once, destroyed once; the driver keeps what still waits for it.
        let _ = unsafe { call!(cuEventDestroy_v2(self.event)) };
    }
}

/// A function of a module, which must outlive its launches.
#[derive(Clone, Copy)]
pub(super) struct Kernel(CUfunction);

// SAFETY: a function is launched from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Kernels' code on the device.
pub(super) struct Code {
    context: Arc<Context>,
    module: CUmodule,
}

// SAFETY: the driver takes calls on a module from any thread.
unsafe impl Send for Code {}
// SAFETY: as above.
unsafe impl Sync for Code {}

impl Code {
    /// Loads a cubin, or PTX, which ends with a zero.
    pub(super) fn load(context: &Arc<Context>, image: &CStr) -> Result<Self> {
        let mut module = null_mut();
        context.bind()?;
        // SAFETY: a context is current; the image is complete.
        unsafe { call!(cuModuleLoadData(&mut module, image.as_ptr().cast())) }?;
        Ok(Code { context: context.clone(), module })
    }

    pub(super) fn kernel(&self, name: &str) -> Result<Kernel> {
        let mut function = null_mut();
        let name = CString::new(name).unwrap_or_default();
        self.context.bind()?;
        // SAFETY: the module is there; a handle is written.
        unsafe { call!(cuModuleGetFunction(&mut function, self.module, name.as_ptr())) }?;
        Ok(Kernel(function))
    }
}

impl Drop for Code {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: loaded once, unloaded once, after the streams that used it.
        let _ = unsafe { call!(cuModuleUnload(self.module)) };
    }
}
