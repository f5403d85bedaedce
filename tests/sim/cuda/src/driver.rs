//! The driver's state: devices, what is current where, and what tests want of calls.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    ffi::CString,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use cudarc::driver::sys::CUresult;
use ebbtide_ptx::Module;
use ebbtide_simgpu::{Order, Progress, Refused, Waiting, World};

use crate::control::{Action, Card, Rule};

/// Longest time that a wait of the host's may take.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All of it.
pub(crate) struct Driver {
    pub(crate) card: Mutex<Card>,
    order: Mutex<Order>,
    /// Whether a broken rule ends the process: nobody is there to ask for it.
    ends: bool,
    devices: Mutex<BTreeMap<usize, Arc<Device>>>,
    /// Parsed once a process, since many devices load the same.
    code: Mutex<HashMap<u64, Arc<Module>>>,
}

/// A device.
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    state: Mutex<State>,
}

pub(crate) struct State {
    pub(crate) world: World,
    /// The order of the next world.
    pub(crate) order: Order,
    pub(crate) retained: usize,
    /// A kernel by its handle: its module, its name, and the bytes of its parameters.
    pub(crate) kernels: Vec<(usize, String, Vec<usize>)>,
    pub(crate) rules: Vec<Rule>,
    pub(crate) calls: HashMap<&'static str, u64>,
    /// What every call says from now on.
    pub(crate) broken: Option<CUresult>,
    /// Of worlds that are closed.
    pub(crate) findings: Vec<String>,
    reported: usize,
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<Device>>> = const { RefCell::new(None) };
}

pub(crate) static DRIVER: LazyLock<Driver> = LazyLock::new(|| {
    let order = std::env::var("EBBTIDE_SIM_ORDER").ok();
    let order = order.map(|text| parse(&text).unwrap_or_else(|| panic!("EBBTIDE_SIM_ORDER: {text}")));
    Driver {
        card: Mutex::default(),
        order: Mutex::new(order.unwrap_or_default()),
        ends: std::env::var_os("EBBTIDE_SIM_ORDER").is_some(),
        devices: Mutex::default(),
        code: Mutex::default(),
    }
});

/// `eager`, `lazy` or `random:SEED`.
pub(crate) fn parse(order: &str) -> Option<Order> {
    match order {
        "eager" => Some(Order::Eager),
        "lazy" => Some(Order::Lazy),
        _ => order.strip_prefix("random:")?.parse().ok().map(Order::Random),
    }
}

impl Driver {
    pub(crate) fn device(&self, ordinal: usize) -> Arc<Device> {
        let make = || {
            let (order, card) = (*lock(&self.order), lock(&self.card).clone());
            Arc::new(Device { ordinal, state: Mutex::new(State::new(order, card.memory_bytes)) })
        };
        lock(&self.devices).entry(ordinal).or_insert_with(make).clone()
    }

    pub(crate) fn code(&self, ptx: &str) -> Result<Arc<Module>, CUresult> {
        let mut hasher = DefaultHasher::new();
        ptx.hash(&mut hasher);
        let mut code = lock(&self.code);
        if let Some(module) = code.get(&hasher.finish()) {
            return Ok(module.clone());
        }
        let module = Arc::new(Module::load(ptx).map_err(|_| CUresult::CUDA_ERROR_INVALID_PTX)?);
        Ok(code.entry(hasher.finish()).or_insert(module).clone())
    }
}

impl State {
    fn new(order: Order, memory_bytes: usize) -> Self {
        State {
            world: World::new(memory_bytes, order),
            order,
            retained: 0,
            kernels: Vec::new(),
            rules: Vec::new(),
            calls: HashMap::new(),
            broken: None,
            findings: Vec::new(),
            reported: 0,
        }
    }

    /// What a test wants of a call, which is counted.
    fn rule(&mut self, call: &'static str) -> Option<Action> {
        let calls = self.calls.entry(call).or_default();
        let number = *calls;
        *calls += 1;
        let rule = self.rules.iter().find(|rule| {
            rule.call.as_str() == call && (rule.skip..rule.skip.saturating_add(rule.count)).contains(&number)
        });
        rule.map(|rule| rule.action)
    }

    /// The device is used by nobody any more: what is left is found, and the next user gets a new one.
    pub(crate) fn close(&mut self, memory_bytes: usize) {
        self.world.close();
        let findings = self.world.findings().iter().map(ToString::to_string);
        self.findings.extend(findings);
        self.world = World::new(memory_bytes, self.order);
        self.kernels.clear();
        self.broken = None;
    }

    pub(crate) fn all_findings(&self) -> Vec<String> {
        self.findings.iter().cloned().chain(self.world.findings().iter().map(ToString::to_string)).collect()
    }
}

pub(crate) fn code_of(refused: Refused) -> CUresult {
    match refused {
        Refused::InvalidValue => CUresult::CUDA_ERROR_INVALID_VALUE,
        Refused::InvalidHandle => CUresult::CUDA_ERROR_INVALID_HANDLE,
        Refused::OutOfMemory => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        Refused::NotFound => CUresult::CUDA_ERROR_NOT_FOUND,
        Refused::AlreadyRegistered => CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
        Refused::NotRegistered => CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
        Refused::IllegalAddress => CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
    }
}

pub(crate) fn result(done: Result<(), CUresult>) -> CUresult {
    done.err().unwrap_or(CUresult::CUDA_SUCCESS)
}

/// The device that is this thread's.
pub(crate) fn current() -> Result<Arc<Device>, CUresult> {
    CURRENT.with_borrow(Clone::clone).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)
}

pub(crate) fn set_current(device: Option<Arc<Device>>) {
    CURRENT.set(device);
}

/// A call on this thread's device, unless a test wants otherwise of it.
pub(crate) fn call(name: &'static str, run: impl FnOnce(&mut State) -> Result<(), CUresult>) -> CUresult {
    result(current().and_then(|device| device.call(name, run)))
}

impl Device {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn call(
        &self,
        name: &'static str,
        run: impl FnOnce(&mut State) -> Result<(), CUresult>,
    ) -> Result<(), CUresult> {
        let mut state = self.state();
        if let Some(code) = state.broken {
            return Err(code);
        }
        match state.rule(name) {
            Some(Action::Fail(code)) => return Err(known(code)),
            Some(Action::Break(code)) => {
                state.broken = Some(known(code));
                state.world.lose();
                return Err(known(code));
            }
            Some(Action::Ignore) => return Ok(()),
            None => {}
        }
        state.world.breathe();
        let done = run(&mut state);
        state.report();
        done
    }

    /// A call that waits; the device is free for others meanwhile.
    pub(crate) fn wait(
        &self,
        name: &'static str,
        start: impl FnOnce(&mut State) -> Result<Waiting, Refused>,
    ) -> Result<(), CUresult> {
        let mut waiting = None;
        self.call(name, |state| {
            waiting = Some(start(state).map_err(code_of)?);
            Ok(())
        })?;
        // A wait that a test has left out.
        let Some(waiting) = waiting else { return Ok(()) };
        let start = Instant::now();
        loop {
            let mut state = self.state();
            if let Some(code) = state.broken {
                return Err(code);
            }
            let progress = state.world.wait(&waiting);
            state.report();
            match progress.map_err(code_of)? {
                Progress::Done => return Ok(()),
                Progress::Blocked if start.elapsed() > PATIENCE => {
                    state.world.give_up();
                    state.report();
                }
                Progress::Blocked => {
                    drop(state);
                    std::thread::sleep(Duration::from_micros(20));
                }
            }
        }
    }
}

impl State {
    /// A broken rule is the end of a process in which nobody asks for them.
    fn report(&mut self) {
        let found = self.all_findings();
        if DRIVER.ends && found.len() > self.reported {
            for finding in &found[self.reported..] {
                eprintln!("simulated driver: {finding}");
            }
            std::process::abort();
        }
        self.reported = found.len();
    }
}

/// A code of the driver's by its number.
pub(crate) fn known(code: u32) -> CUresult {
    use CUresult::*;
    let codes = [
        CUDA_ERROR_INVALID_VALUE,
        CUDA_ERROR_OUT_OF_MEMORY,
        CUDA_ERROR_NO_DEVICE,
        CUDA_ERROR_ECC_UNCORRECTABLE,
        CUDA_ERROR_INVALID_PTX,
        CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
        CUDA_ERROR_LAUNCH_FAILED,
        CUDA_ERROR_ILLEGAL_ADDRESS,
    ];
    codes.into_iter().find(|&known| known as u32 == code).unwrap_or(CUDA_ERROR_UNKNOWN)
}

/// A code's name, which lives for ever.
pub(crate) fn name(code: CUresult) -> &'static std::ffi::CStr {
    static NAMES: LazyLock<Mutex<HashMap<u32, &'static CString>>> = LazyLock::new(Mutex::default);
    let make = || &*Box::leak(Box::new(CString::new(format!("{code:?}")).expect("a name has no zeros")));
    lock(&NAMES).entry(code as u32).or_insert_with(make)
}
