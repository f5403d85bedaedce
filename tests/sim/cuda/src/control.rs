//! What tests tell the simulated driver, and ask it.

use std::{
    ffi::{CStr, CString, c_char, c_void},
    path::{Path, PathBuf},
    sync::OnceLock,
};

use ebbtide_simgpu::Order;
use libloading::Library;

use crate::driver::{DRIVER, lock, parse};

/// The machine that is played.
#[derive(Clone, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Card {
    /// The driver's version, as 1000 · major + 10 · minor.
    pub driver: i32,
    /// Devices there are.
    pub devices: usize,
    /// Compute capability: major.
    pub major: i32,
    /// Compute capability: minor.
    pub minor: i32,
    /// Memory of each device.
    pub memory_bytes: usize,
}

impl Default for Card {
    /// A driver of CUDA 13 and 4096 devices like an H200.
    fn default() -> Self {
        Card { driver: 13_000, devices: 4096, major: 9, minor: 0, memory_bytes: 141 << 30 }
    }
}

/// What a call does instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, u32)]
pub enum Action {
    /// It fails with a code of the driver's, and does nothing.
    Fail(u32),
    /// It fails, and so does every call after it.
    Break(u32),
    /// It does nothing, and succeeds.
    Ignore,
}

/// What some calls of a device do instead.
#[derive(Clone, Debug)]
pub struct Rule {
    /// The call's name, as the driver exports it.
    pub call: String,
    /// How many calls of the name, from the device's first, are left alone.
    pub skip: u64,
    /// How many the rule is for.
    pub count: u64,
    /// What they do.
    pub action: Action,
}

/// Receives a text.
type Reply = unsafe extern "C" fn(data: *mut c_void, text: *const c_char);

#[unsafe(no_mangle)]
unsafe extern "C" fn ebbtide_sim_card(card: *const Card) {
    // SAFETY: the caller has one.
    *lock(&DRIVER.card) = unsafe { &*card }.clone();
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ebbtide_sim_open(ordinal: usize, order: *const c_char) {
    // SAFETY: the caller gives a string.
    let order = parse(&unsafe { CStr::from_ptr(order) }.to_string_lossy()).unwrap_or_default();
    let device = DRIVER.device(ordinal);
    let mut state = device.state();
    state.order = order;
    state.rules.clear();
    state.calls.clear();
    state.findings.clear();
    let memory_bytes = lock(&DRIVER.card).memory_bytes;
    state.close(memory_bytes);
    state.findings.clear();
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ebbtide_sim_rule(
    ordinal: usize,
    call: *const c_char,
    skip: u64,
    count: u64,
    action: Action,
) {
    // SAFETY: the caller gives a string.
    let call = unsafe { CStr::from_ptr(call) }.to_string_lossy().into_owned();
    DRIVER.device(ordinal).state().rules.push(Rule { call, skip, count, action });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ebbtide_sim_findings(ordinal: usize, reply: Reply, data: *mut c_void) {
    for finding in DRIVER.device(ordinal).state().all_findings() {
        let text = CString::new(finding).unwrap_or_default();
        // SAFETY: the caller's function, given what it asked for.
        unsafe { reply(data, text.as_ptr()) };
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ebbtide_sim_calls(ordinal: usize, call: *const c_char) -> u64 {
    // SAFETY: the caller gives a string.
    let call = unsafe { CStr::from_ptr(call) }.to_string_lossy();
    DRIVER.device(ordinal).state().calls.get(&*call).copied().unwrap_or_default()
}

#[unsafe(no_mangle)]
extern "C" fn ebbtide_sim_trace(ordinal: usize) -> u64 {
    DRIVER.device(ordinal).state().world.trace()
}

/// The simulated driver and its library of products, loaded in place of CUDA's.
#[derive(Debug)]
pub struct Simulator {
    driver: Library,
    products: OnceLock<Library>,
}

impl Simulator {
    /// Loads it, once a process, before anything else loads CUDA's: from the folder where the running test lies.
    ///
    /// # Panics
    /// The libraries are not there.
    pub fn load() -> &'static Simulator {
        let simulator = Self::load_driver();
        simulator.products.get_or_init(|| library("libebbtide_simcublaslt.so"));
        simulator
    }

    /// The driver alone, as [`Simulator::load`] does.
    ///
    /// # Panics
    /// The library is not there.
    pub fn load_driver() -> &'static Simulator {
        static LOADED: OnceLock<Simulator> = OnceLock::new();
        LOADED
            .get_or_init(|| Simulator { driver: library("libebbtide_simcuda.so"), products: OnceLock::new() })
    }

    fn get<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the functions above, each under its own type.
        *unsafe { self.driver.get::<T>(name) }.expect("a function of this crate")
    }

    /// Plays another machine, for devices that are not open yet.
    pub fn set_card(&self, card: &Card) {
        let call: unsafe extern "C" fn(*const Card) = self.get("ebbtide_sim_card");
        // SAFETY: it reads the card.
        unsafe { call(card) }
    }

    /// Makes a device new, which nobody may be using.
    pub fn reset(&self, ordinal: usize, order: Order) {
        let call: unsafe extern "C" fn(usize, *const c_char) = self.get("ebbtide_sim_open");
        let text = match order {
            Order::Eager => "eager".to_string(),
            Order::Lazy => "lazy".to_string(),
            Order::Random(seed) => format!("random:{seed}"),
        };
        // SAFETY: it reads the text.
        with(&text, |text| unsafe { call(ordinal, text) });
    }

    /// Has some calls of a device do something else.
    pub fn rule(&self, ordinal: usize, rule: &Rule) {
        type Call = unsafe extern "C" fn(usize, *const c_char, u64, u64, Action);
        let call: Call = self.get("ebbtide_sim_rule");
        // SAFETY: it reads the text.
        with(&rule.call, |name| unsafe { call(ordinal, name, rule.skip, rule.count, rule.action) });
    }

    /// Rules that a device's users have broken since it was new; `FindingKind` and what happened.
    pub fn findings(&self, ordinal: usize) -> Vec<String> {
        unsafe extern "C" fn push(data: *mut c_void, text: *const c_char) {
            // SAFETY: the vector below, and a string that lives through the call.
            let (texts, text) = unsafe { (&mut *data.cast::<Vec<String>>(), CStr::from_ptr(text)) };
            texts.push(text.to_string_lossy().into_owned());
        }
        let call: unsafe extern "C" fn(usize, Reply, *mut c_void) = self.get("ebbtide_sim_findings");
        let mut texts = Vec::new();
        // SAFETY: the function takes the vector.
        unsafe { call(ordinal, push, (&raw mut texts).cast()) };
        texts
    }

    /// How often a call was made on a device since it was new.
    pub fn calls(&self, ordinal: usize, name: &str) -> u64 {
        let call: unsafe extern "C" fn(usize, *const c_char) -> u64 = self.get("ebbtide_sim_calls");
        // SAFETY: it reads the text.
        with(name, |name| unsafe { call(ordinal, name) })
    }

    /// What ran on a device, in its order, as one number.
    pub fn trace(&self, ordinal: usize) -> u64 {
        let call: extern "C" fn(usize) -> u64 = self.get("ebbtide_sim_trace");
        call(ordinal)
    }
}

fn with<T>(text: &str, call: impl FnOnce(*const c_char) -> T) -> T {
    let text = CString::new(text).expect("a text without zeros");
    call(text.as_ptr())
}

fn library(name: &str) -> Library {
    let path = folder().join(name);
    // SAFETY: a library of this workspace, which runs nothing when it is loaded.
    unsafe { Library::new(&path) }.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Where cargo puts libraries: beside tests, or above them for what a test starts.
fn folder() -> PathBuf {
    let test = std::env::current_exe().unwrap_or_default();
    let beside = test.parent().unwrap_or(Path::new(".")).to_path_buf();
    let deps = beside.join("deps");
    if deps.is_dir() { deps } else { beside }
}
