//! [`Device`] and [`Stream`]: where ops are submitted and memory is held.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    ops::Range,
    str::FromStr,
    sync::{
        Arc, Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    Category, DType, Element, Error, FileSlice, HostBuffer, HostSlice, Link, MemoryReport, Op, OpTime,
    OutOfMemory, Rates, Result, Slice, SpillFile, SpillOptions,
    arena::{ALIGNMENT, Arena},
    backend::{Backend, Job, SimOptions, cpu::CpuBackend, cuda::CudaBackend, sim::SimBackend},
    buffer::{Buffer, HostInner},
    ledger::Ledger,
    memory::{HostBlock, Memory},
    op::{Mode, Place},
    order::{Access, Order, Space, Stamp},
    spill::FileBlock,
    timeline::Timeline,
};

/// What a dry device without a budget may hold.
const DRY_BYTES: usize = 1 << 60;

/// Which device to open: `cpu`, `cuda` or `cuda:N`, or `best`, which is [`Device::best`]'s choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// The CPU.
    #[default]
    Cpu,
    /// A CUDA device, by number.
    Cuda(usize),
    /// The first CUDA device, or else the CPU.
    Best,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceKind::Cpu => f.write_str("cpu"),
            DeviceKind::Cuda(0) => f.write_str("cuda"),
            DeviceKind::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            DeviceKind::Best => f.write_str("best"),
        }
    }
}

impl FromStr for DeviceKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("`{text}` is no device: expected `cpu`, `cuda`, `cuda:N` or `best`");
        match text {
            "cpu" => Ok(DeviceKind::Cpu),
            "cuda" => Ok(DeviceKind::Cuda(0)),
            "best" => Ok(DeviceKind::Best),
            _ => {
                let ordinal = text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
                ordinal.map(DeviceKind::Cuda).ok_or_else(unknown)
            }
        }
    }
}

/// How a device of any kind is set up.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// Which.
    pub kind: DeviceKind,
    /// Threads of the CPU's kernels; the machine's cores if not given.
    pub threads: Option<usize>,
    /// Most bytes the device may hold.
    pub budget_bytes: Option<usize>,
}

/// How a CPU device is set up.
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Threads of the kernels; the machine's cores if not given. Results do not depend on it.
    pub threads: Option<usize>,
    /// Most bytes the device may hold; only the machine limits it if not given.
    pub budget_bytes: Option<usize>,
}

/// How a CUDA device is set up.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// The device's number, as the driver counts.
    pub ordinal: usize,
    /// Bytes that the device may hold, taken from the driver at the start; nearly all that are free if not given. Beside them
    /// a stream that computes has 33 MiB, and the driver's context some hundreds of MiB.
    pub budget_bytes: Option<usize>,
}

/// A device: memory, streams, and a backend chosen at run time. Cloning is cheap.
#[derive(Clone)]
pub struct Device(Arc<Shared>);

/// An in-order queue of a device. Cloning is cheap.
#[derive(Clone)]
pub struct Stream {
    device: Device,
    index: usize,
}

/// What was submitted to a stream, and how its time went.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StreamReport {
    /// The stream's name.
    pub name: String,
    /// Ops submitted.
    pub ops: u64,
    /// Waits on other streams that the order layer added.
    pub waits: u64,
    /// Seconds that ops ran, virtual ones on [`Device::timed`], the device's on `cuda`, where what kernels between two waits lacked
    /// because the host was late counts too; 0 where nothing is timed (`sim`, `dry`).
    pub busy_seconds: f64,
    /// Seconds that the stream stood still, waiting for another; 0 where nothing is timed.
    pub wait_seconds: f64,
    /// The same by the name of the stream waited for.
    pub wait_seconds_on: BTreeMap<String, f64>,
}

/// Counts of an op's submissions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpCount {
    /// Submissions.
    pub count: u64,
    /// Floating-point operations.
    pub flops: u64,
    /// Device bytes read and written.
    pub bytes: u64,
}

pub(crate) struct Shared {
    state: Mutex<State>,
    backend: Backend,
    next_id: AtomicU64,
    budget_bytes: Option<usize>,
}

struct State {
    arena: Arena,
    ledger: Ledger,
    order: Order,
    streams: Vec<StreamReport>,
    counts: BTreeMap<String, OpCount>,
    /// By buffer: key, bytes and name of what must not be written.
    protected: HashMap<u64, Vec<(u64, Range<usize>, String)>>,
}

impl Device {
    /// The CPU, with all cores and no budget.
    ///
    /// # Errors
    /// [`Error::Start`] if the system refuses threads or address space.
    pub fn cpu() -> Result<Self> {
        Self::cpu_with(CpuOptions::default())
    }

    /// The CPU.
    ///
    /// # Errors
    /// [`Error::Start`] if the system refuses threads or address space.
    pub fn cpu_with(options: CpuOptions) -> Result<Self> {
        let memory = reserve(options.budget_bytes)?;
        let backend = CpuBackend::new(memory.clone(), options.threads)?;
        Ok(Self::new(Backend::Cpu(backend), memory.len(), options.budget_bytes))
    }

    /// A device of the kind asked for.
    ///
    /// # Errors
    /// As for [`Device::cpu_with`] and [`Device::cuda_with`].
    pub fn open(options: &DeviceOptions) -> Result<Self> {
        let &DeviceOptions { kind, threads, budget_bytes } = options;
        match kind {
            DeviceKind::Cpu => Self::cpu_with(CpuOptions { threads, budget_bytes }),
            DeviceKind::Cuda(ordinal) => Self::cuda_with(CudaOptions { ordinal, budget_bytes }),
            DeviceKind::Best => Self::best_with(threads, budget_bytes),
        }
    }

    /// A CUDA device, with nearly all of its free memory.
    ///
    /// # Errors
    /// [`Error::Cuda`] where it cannot be used: the driver, cuBLASLt or the device is not there, or is too old. [`Error::Driver`] if
    /// the driver fails.
    pub fn cuda(ordinal: usize) -> Result<Self> {
        Self::cuda_with(CudaOptions { ordinal, ..CudaOptions::default() })
    }

    /// A CUDA device.
    ///
    /// # Errors
    /// As for [`Device::cuda`]; and [`CudaUnavailable::Memory`](crate::CudaUnavailable::Memory) if the card does not hold the budget.
    pub fn cuda_with(options: CudaOptions) -> Result<Self> {
        let (backend, capacity) = CudaBackend::new(options.ordinal, options.budget_bytes)?;
        Ok(Self::new(Backend::Cuda(Box::new(backend)), capacity, options.budget_bytes))
    }

    /// The first CUDA device, or else the CPU; which of the two, and why, is said on the standard error stream once in a process.
    ///
    /// # Errors
    /// As for [`Device::cpu`].
    pub fn best() -> Result<Self> {
        Self::best_with(None, None)
    }

    fn best_with(threads: Option<usize>, budget_bytes: Option<usize>) -> Result<Self> {
        static SAID: Once = Once::new();
        let (device, said) = match Self::cuda_with(CudaOptions { ordinal: 0, budget_bytes }) {
            Ok(device) => {
                let name = device.name().to_string();
                (device, format!("running on {name}"))
            }
            Err(error) => (
                Self::cpu_with(CpuOptions { threads, budget_bytes })?,
                format!("running on the CPU: {error}"),
            ),
        };
        SAID.call_once(|| eprintln!("ebbtide: {said}"));
        Ok(device)
    }

    /// The CPU's kernels under a seeded scheduler that runs ops in any order that the recorded waits allow, and checks
    /// every access; for tests. One seed is one schedule.
    ///
    /// # Errors
    /// [`Error::Start`] if the system refuses threads or address space.
    pub fn sim(options: SimOptions) -> Result<Self> {
        let budget_bytes = options.budget_bytes;
        let memory = reserve(budget_bytes)?;
        let backend = SimBackend::new(memory.clone(), options)?;
        Ok(Self::new(Backend::Sim(Box::new(Mutex::new(backend))), memory.len(), budget_bytes))
    }

    /// No memory and no execution: allocations are accounted and ops are checked and counted, by the same code that
    /// serves the other backends. Host reads give zeros. For planning.
    pub fn dry(budget_bytes: Option<usize>) -> Self {
        Self::new(Backend::Dry(None), budget_bytes.unwrap_or(DRY_BYTES), budget_bytes)
    }

    /// As [`Device::dry`], with a virtual clock: when each op would run on the `cuda` backend, on a card of these rates. The clock is
    /// the host's: it goes on by what each launch takes, and to the end of what the host waits for. [`Device::streams`] then has times.
    /// An op that the backend has no kernels for is refused as it would be there.
    pub fn timed(rates: Rates, budget_bytes: Option<usize>) -> Self {
        let timeline = Box::new(Mutex::new(Timeline::new(rates)));
        Self::new(Backend::Dry(Some(timeline)), budget_bytes.unwrap_or(DRY_BYTES), budget_bytes)
    }

    /// Virtual seconds since the device was made, and the launches made in them; `None` where time is not virtual.
    pub fn virtual_time(&self) -> Option<(f64, u64)> {
        match &self.0.backend {
            Backend::Dry(Some(timeline)) => Some(lock(timeline).now()),
            _ => None,
        }
    }

    /// What the link to pinned host memory does in a second; `None` where there is no link. It is measured when first asked for, in some
    /// 20 ms, with 32 MiB of pinned memory and 32 MiB of the device's beside the budget.
    ///
    /// # Errors
    /// [`Error::Driver`] if the driver fails, above all for want of memory.
    pub fn link(&self) -> Result<Option<Link>> {
        match &self.0.backend {
            Backend::Cuda(backend) => backend.link().map(Some),
            _ => Ok(None),
        }
    }

    /// What ops took, by name; empty where time is not virtual.
    pub fn op_times(&self) -> BTreeMap<String, OpTime> {
        match &self.0.backend {
            Backend::Dry(Some(timeline)) => lock(timeline).op_times(),
            _ => BTreeMap::new(),
        }
    }

    fn new(backend: Backend, capacity: usize, budget_bytes: Option<usize>) -> Self {
        let forget_read = match &backend {
            Backend::Sim(backend) => lock(backend).forget_read(),
            _ => None,
        };
        let state = State {
            arena: Arena::new(capacity, ALIGNMENT),
            ledger: Ledger::default(),
            order: Order::new(forget_read),
            streams: Vec::new(),
            counts: BTreeMap::new(),
            protected: HashMap::new(),
        };
        Device(Arc::new(Shared {
            state: Mutex::new(state),
            backend,
            next_id: AtomicU64::new(1),
            budget_bytes,
        }))
    }

    /// The card's name, or the backend's where there is no card.
    pub fn name(&self) -> &str {
        match &self.0.backend {
            Backend::Cuda(backend) => backend.name(),
            _ => self.backend_name(),
        }
    }

    /// The backend's name: `cpu`, `cuda`, `sim` or `dry`.
    pub fn backend_name(&self) -> &'static str {
        match self.0.backend {
            Backend::Cpu(_) => "cpu",
            Backend::Cuda(_) => "cuda",
            Backend::Sim(_) => "sim",
            Backend::Dry(_) => "dry",
        }
    }

    /// Whether nothing is executed: see [`Device::dry`].
    pub fn is_dry(&self) -> bool {
        matches!(self.0.backend, Backend::Dry(_))
    }

    /// A new in-order queue.
    pub fn stream(&self, name: &str) -> Stream {
        let mut state = self.0.lock();
        let index = state.order.add_stream();
        state.streams.push(StreamReport { name: name.to_string(), ..StreamReport::default() });
        match &self.0.backend {
            Backend::Cpu(backend) => backend.add_stream(name),
            Backend::Cuda(backend) => backend.add_stream(),
            Backend::Sim(backend) => lock(backend).add_stream(name),
            Backend::Dry(timeline) => timeline.iter().for_each(|timeline| lock(timeline).add_stream()),
        }
        Stream { device: self.clone(), index }
    }

    /// Device memory for `len` elements; what it holds is undefined until written.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the budget cannot hold it; nothing is changed then.
    pub fn alloc(&self, len: usize, dtype: DType, category: Category, name: &str) -> Result<Slice> {
        let bytes = len.saturating_mul(dtype.size_bytes());
        let mut state = self.0.lock();
        let injected = match &self.0.backend {
            Backend::Sim(backend) => lock(backend).fails_alloc(),
            _ => false,
        };
        let range = if injected { None } else { state.arena.alloc(bytes) };
        let Some(range) = range else {
            return Err(Error::OutOfMemory(OutOfMemory {
                name: name.to_string(),
                bytes,
                budget_bytes: state.arena.capacity(),
                in_use_bytes: state.ledger.report().current_bytes,
                largest_free_bytes: state.arena.largest_free(),
                largest: state.ledger.largest(5),
            }));
        };
        let id = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        state.ledger.add(id, name, category, range.len());
        if let Backend::Sim(backend) = &self.0.backend {
            lock(backend).allocated(range.clone());
        }
        drop(state);
        let buffer = Buffer { device: self.0.clone(), id, range, name: name.to_string(), category };
        Ok(Slice::new(Arc::new(buffer), len, dtype))
    }

    /// Host memory for transfers, zeroed.
    ///
    /// # Errors
    /// [`Error::HostMemory`] if the system has no memory for it, or refuses to lock that much.
    pub fn host_buffer(&self, bytes: usize, name: &str) -> Result<HostBuffer> {
        let failed = |reason: String| Error::HostMemory { name: name.to_string(), bytes, reason };
        if let Backend::Sim(backend) = &self.0.backend {
            let in_use = self.0.lock().ledger.report().host_bytes;
            lock(backend).check_host(in_use, bytes).map_err(failed)?;
        }
        let block = match &self.0.backend {
            Backend::Cuda(backend) => backend.host_block(bytes).map_err(failed)?,
            _ => HostBlock::new(bytes).ok_or_else(|| failed("the system has not that much".to_string()))?,
        };
        Ok(self.host(block, bytes, name))
    }

    /// Host memory for transfers of which all is taken from the system now, zeroed, so that nothing is when it is first used.
    ///
    /// # Errors
    /// As for [`Device::host_buffer`].
    pub fn host_slab(&self, bytes: usize, name: &str) -> Result<HostBuffer> {
        let available = crate::available_memory();
        if !self.is_dry() && bytes > available {
            let reason = format!("{} are available", crate::bytes(available));
            return Err(Error::HostMemory { name: name.to_string(), bytes, reason });
        }
        let slab = self.host_buffer(bytes, name)?;
        if !self.is_dry() {
            slab.0.block.touch();
        }
        Ok(slab)
    }

    /// Host memory for transfers without a size of its own: address space, of which pages are taken from the system when
    /// first touched. It counts for nothing in [`Device::memory`].
    ///
    /// # Errors
    /// [`Error::HostMemory`] if the system gives no address space.
    pub fn host_unlimited(&self, name: &str) -> Result<HostBuffer> {
        let block = HostBlock::reserve().map_err(|cause| Error::HostMemory {
            name: name.to_string(),
            bytes: 0,
            reason: cause.to_string(),
        })?;
        let block = match &self.0.backend {
            Backend::Cuda(backend) => block.pin_with(backend.pin_on_use()),
            _ => block,
        };
        Ok(self.host(block, 0, name))
    }

    fn host(&self, block: HostBlock, counted: usize, name: &str) -> HostBuffer {
        let id = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        self.0.lock().ledger.add_host(counted);
        let (device, name, block) = (self.0.clone(), name.to_string(), Arc::new(block));
        HostBuffer(Arc::new(HostInner { device, id, name, block, counted }))
    }

    /// Disk space for what host memory does not hold.
    ///
    /// # Errors
    /// [`Error::Disk`] if the folder cannot be written, or its disk has not that much.
    pub fn spill_file(&self, options: &SpillOptions) -> Result<SpillFile> {
        let block = match self.is_dry() {
            true => FileBlock::dry(options),
            false => FileBlock::new(options)?,
        };
        let id = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        Ok(SpillFile::new(self.0.clone(), id, block))
    }

    /// Device bytes in use now.
    pub fn in_use_bytes(&self) -> usize {
        self.0.lock().ledger.in_use_bytes()
    }

    /// The budget that the device was made with.
    pub fn budget_bytes(&self) -> Option<usize> {
        self.0.budget_bytes
    }

    /// Waits for every op of every stream.
    ///
    /// # Errors
    /// The first error of an op since the last call. Ops that were submitted after the failed one have been skipped;
    /// the device is usable again.
    pub fn synchronize(&self) -> Result<()> {
        let tails = self.0.lock().order.tails();
        // Waiting tells of an error, and leaves it for whoever takes it: here.
        let waited = self.0.wait(&tails);
        match &self.0.backend {
            Backend::Cpu(backend) => backend.take_error(),
            Backend::Cuda(backend) => backend.take_error(),
            Backend::Sim(backend) => lock(backend).take_error(),
            Backend::Dry(_) => waited,
        }
    }

    /// Memory in use, by category, now and at most.
    pub fn memory(&self) -> MemoryReport {
        let state = self.0.lock();
        let mut report = state.ledger.report();
        report.extent_bytes = state.arena.high_water();
        report.budget_bytes = self.0.budget_bytes;
        report
    }

    /// Starts the peaks over from what is in use now.
    pub fn reset_peaks(&self) {
        let mut state = self.0.lock();
        state.ledger.reset_peaks();
        state.arena.reset_high_water();
    }

    /// What each stream was given, and how its time went.
    pub fn streams(&self) -> Vec<StreamReport> {
        let mut reports = self.0.lock().streams.clone();
        match &self.0.backend {
            Backend::Cpu(backend) => backend.fill_times(&mut reports),
            Backend::Cuda(backend) => backend.fill_times(&mut reports),
            Backend::Dry(Some(timeline)) => lock(timeline).fill_times(&mut reports),
            _ => {}
        }
        reports
    }

    /// Submissions by op name.
    pub fn op_counts(&self) -> BTreeMap<String, OpCount> {
        self.0.lock().counts.clone()
    }
}

impl Stream {
    /// The stream's device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Queues an op. It starts when every op that it must follow, on any stream, is done.
    ///
    /// # Errors
    /// What [`Op::check`] finds, [`Error::OtherDevice`], [`Error::HostBusy`]; nothing is queued then. Errors while the
    /// op runs come from the next wait on the host.
    pub fn submit(&self, op: Op) -> Result<()> {
        op.check()?;
        self.device.0.submit(self.index, op)
    }

    /// What it was given, and how its time went.
    pub fn report(&self) -> StreamReport {
        self.device.streams().swap_remove(self.index)
    }

    /// Waits for every op submitted to this stream so far.
    ///
    /// # Errors
    /// The first error of an op, which stays until [`Device::synchronize`] takes it.
    pub fn synchronize(&self) -> Result<()> {
        let tail = self.device.0.lock().order.tails()[self.index];
        self.device.0.wait(&[tail])
    }

    /// Copies elements to the device, in a new allocation.
    ///
    /// # Errors
    /// Those of allocation and submission.
    pub fn upload<T: Element>(&self, elements: &[T], category: Category, name: &str) -> Result<Slice> {
        let out = self.device.alloc(elements.len(), T::DTYPE, category, name)?;
        let host = self.device.host_buffer(out.bytes(), name)?;
        host.all().write(|bytes| bytes.copy_from_slice(bytemuck::cast_slice(elements)))?;
        self.submit(Op::CopyIn { input: host.all(), out: out.clone() })?;
        Ok(out)
    }

    /// Copies a slice to the host and waits for it.
    ///
    /// # Errors
    /// Those of submission, and of the ops that made the slice.
    pub fn download<T: Element>(&self, slice: &Slice) -> Result<Vec<T>> {
        if slice.dtype() != T::DTYPE {
            return Err(Error::BadOperand {
                op: "download".to_string(),
                operand: "slice",
                expected: T::DTYPE.to_string(),
                found: slice.dtype().to_string(),
            });
        }
        let host = self.device.host_buffer(slice.bytes(), "download")?;
        self.submit(Op::CopyOut { input: slice.clone(), out: host.all() })?;
        host.all().to_vec()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn submit(self: &Arc<Self>, stream: usize, mut op: Op) -> Result<()> {
        let mut accesses = Vec::new();
        for operand in op.operands() {
            let device = match operand.place {
                Place::Device(slice) => slice.device(),
                Place::Host(slice) => slice.device(),
                Place::File(slice) => slice.device(),
            };
            if !device.is_some_and(|device| Arc::ptr_eq(device, self)) {
                return Err(Error::OtherDevice { op: op.name().to_string(), operand: operand.name });
            }
            accesses.push(match operand.place {
                Place::Device(slice) => {
                    Access { space: Space::Device, range: slice.range(), mode: operand.mode }
                }
                Place::Host(slice) => slice.access(operand.mode),
                Place::File(slice) => slice.access(operand.mode),
            });
        }
        match &self.backend {
            Backend::Cpu(backend) => backend.throttle(stream),
            Backend::Cuda(backend) => backend.check(&op)?,
            Backend::Dry(Some(_)) => crate::cuda::check(&op)?,
            _ => {}
        }
        let mut state = self.lock();
        for operand in op.operands() {
            if let Place::Host(slice) = operand.place
                && slice.is_busy()
            {
                return Err(Error::HostBusy { name: slice.name().to_string() });
            }
        }
        if !state.protected.is_empty() {
            state.check_protected(&op)?;
        }
        let (stamp, waits) = state.order.submit(stream, &accesses);
        state.streams[stream].ops += 1;
        state.streams[stream].waits += waits.len() as u64;
        let (flops, bytes) = (op.flops(), op.bytes());
        let count = match state.counts.get_mut(op.name()) {
            Some(count) => count,
            None => state.counts.entry(op.name().to_string()).or_default(),
        };
        count.count += 1;
        count.flops += flops;
        count.bytes += bytes;
        let detached: Vec<_> = op.device_slices_mut().into_iter().filter_map(Slice::detach).collect();
        let detached_owners = op.detach_owners();
        // The backend is handed the op under the lock, so that queues fill in the order of the stamps.
        match &self.backend {
            Backend::Cpu(backend) => backend.enqueue(Job { stamp, op, waits }),
            Backend::Cuda(backend) => backend.enqueue(Job { stamp, op, waits }),
            Backend::Sim(backend) => lock(backend).enqueue(Job { stamp, op, waits }, &accesses),
            Backend::Dry(None) => {}
            Backend::Dry(Some(timeline)) => lock(timeline).enqueue(Job { stamp, op, waits }),
        }
        drop(state);
        // These may be the last handles, and dropping those takes the lock.
        drop((detached, detached_owners));
        Ok(())
    }

    fn wait(&self, stamps: &[Stamp]) -> Result<()> {
        match &self.backend {
            Backend::Cpu(backend) => backend.wait(stamps),
            Backend::Cuda(backend) => backend.wait(stamps),
            Backend::Sim(backend) => lock(backend).wait(stamps),
            Backend::Dry(timeline) => {
                timeline.iter().for_each(|timeline| lock(timeline).wait(stamps));
                Ok(())
            }
        }
    }

    pub(crate) fn claim_host(&self, host: &HostInner, access: &Access) -> Result<()> {
        let waits = {
            let state = self.lock();
            if host.block.busy.swap(true, Ordering::Acquire) {
                return Err(Error::HostBusy { name: host.name.clone() });
            }
            state.order.host_waits(access)
        };
        let done = self.wait(&waits).and_then(|()| match &self.backend {
            Backend::Sim(backend) => lock(backend).host_access(access),
            _ => Ok(()),
        });
        if done.is_err() {
            host.block.busy.store(false, Ordering::Release);
        }
        done
    }

    pub(crate) fn protect(&self, buffer: u64, range: Range<usize>, name: &str) -> u64 {
        let key = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.lock().protected.entry(buffer).or_default().push((key, range, name.to_string()));
        key
    }

    pub(crate) fn unprotect(&self, buffer: u64, key: u64) {
        let mut state = self.lock();
        if let Some(ranges) = state.protected.get_mut(&buffer) {
            ranges.retain(|(other, ..)| *other != key);
            if ranges.is_empty() {
                state.protected.remove(&buffer);
            }
        }
    }

    pub(crate) fn is_protected(&self, buffer: u64, range: &Range<usize>) -> bool {
        self.lock().protection_of(buffer, range).is_some()
    }

    pub(crate) fn free(&self, buffer: &Buffer) {
        let mut state = self.lock();
        state.ledger.remove(buffer.id);
        state.arena.free(buffer.range.clone());
    }

    pub(crate) fn free_host(&self, host: &HostInner) {
        let mut state = self.lock();
        state.ledger.remove_host(host.counted);
        state.order.forget(Space::Host(host.id));
    }

    pub(crate) fn forget(&self, space: Space) {
        self.lock().order.forget(space);
    }
}

impl State {
    /// An op writes nothing that is protected.
    fn check_protected(&self, op: &Op) -> Result<()> {
        for operand in op.operands().into_iter().filter(|operand| operand.mode != Mode::Read) {
            let Place::Device(slice) = operand.place else { continue };
            if let Some(saved) = self.protection_of(slice.buffer_id(), &slice.range()) {
                let (op, saved) = (op.name().to_string(), saved.to_string());
                return Err(Error::Protected { op, operand: operand.name, saved });
            }
        }
        Ok(())
    }

    /// What some of these bytes are protected as.
    fn protection_of(&self, buffer: u64, bytes: &Range<usize>) -> Option<&str> {
        let overlaps = |range: &Range<usize>| bytes.start < range.end && range.start < bytes.end;
        let ranges = self.protected.get(&buffer)?;
        ranges.iter().find(|(_, range, _)| overlaps(range)).map(|(.., saved)| saved.as_str())
    }
}

impl Op {
    /// Lets go of the ownership of host memory and files, and returns it to be dropped.
    fn detach_owners(&mut self) -> (Option<HostSlice>, Option<FileSlice>) {
        let (host, file) = match self {
            Op::CopyOut { out, .. } => (Some(out), None),
            Op::CopyIn { input, .. } => (Some(input), None),
            Op::WriteFile { input, file } => (Some(input), Some(file)),
            Op::ReadFile { file, out } => (Some(out), Some(file)),
            _ => (None, None),
        };
        let owned = (host.as_deref().cloned(), file.as_deref().cloned());
        host.into_iter().for_each(HostSlice::detach);
        file.into_iter().for_each(FileSlice::detach);
        owned
    }
}

fn reserve(budget_bytes: Option<usize>) -> Result<Arc<Memory>> {
    Memory::reserve(budget_bytes).map(Arc::new).map_err(|error| {
        let wanted =
            budget_bytes.map_or("address space".to_string(), |bytes| format!("a budget of {bytes} bytes"));
        Error::Start(format!("cannot reserve {wanted}: {error}"))
    })
}

/// A poisoned lock only means that a test's thread panicked elsewhere: the state is updated in one piece.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
